"""Opens a model, listens, and stops without cutting answers off."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import uvicorn

from trt_nvfp4.builder.errors import UnavailableError, UsageError
from trt_nvfp4.builder.generate.drafts.open import check_draft
from trt_nvfp4.builder.generate.open import tokenizer_folder
from trt_nvfp4.builder.generate.tokenizer import Tokenizer
from trt_nvfp4.builder.parallel.launched import Launched
from trt_nvfp4.builder.serve.app import Api
from trt_nvfp4.builder.serve.decoder import Decoder
from trt_nvfp4.builder.serve.guard import LARGEST_BODY, LARGEST_BODY_WITH_IMAGES, Guard, read_keys
from trt_nvfp4.builder.serve.logs import log
from trt_nvfp4.builder.serve.prompts import Prompts
from trt_nvfp4.builder.serve.serve_options import ServeOptions
from trt_nvfp4.builder.serve.service import Service

# Seconds that an idle connection stays open.
_IDLE = 30
_MOST_CONNECTIONS = 2048


def serve(options: ServeOptions) -> None:
    """Serve a model until SIGTERM or SIGINT, which lets running requests end; a second one ends them.

    Raises UsageError for options that do not fit the model, UnavailableError where the address is taken, and as opening
    the model does.
    """
    if Launched.found() is not None:
        raise UsageError("a server starts the processes of a model's ranks itself: leave torchrun or mpirun out")
    check_draft(options.draft)
    keys = [] if options.api_key_file is None else read_keys(options.api_key_file)
    tokenizer = Tokenizer(options.tokenizer or tokenizer_folder(options.model))
    with ExitStack() as stack:
        listening = stack.enter_context(_listening(options.host, options.port))
        decoder = Decoder(options)
        stack.callback(decoder.close)
        facts = decoder.wait()
        prompts = Prompts(options.tokenizer or tokenizer_folder(options.model), facts.preprocessing)
        stack.callback(prompts.close)
        prompts.wait()
        name = options.name or options.model.resolve().name
        service = Service(decoder, facts, tokenizer, prompts, name)
        largest = LARGEST_BODY if facts.preprocessing is None else LARGEST_BODY_WITH_IMAGES
        guard = Guard(keys, options.max_per_client, largest)
        app = Api(service, guard, options.max_seconds).app()
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_IDLE,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=options.drain_seconds,
        )
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log("ready", address=address, model=name, runs_on=facts.runs_on, slots=facts.slots, capacity=facts.capacity)
        _Server(config, decoder).run(sockets=[listening])
        log("stopped")


class _Server(uvicorn.Server):
    """SIGTERM and SIGINT end it with exit code 0: they are what stops a server."""

    def __init__(self, config: uvicorn.Config, decoder: Decoder) -> None:
        super().__init__(config)
        self._decoder = decoder

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        self._decoder.listen(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        log("stopping", message="running requests end; new ones are refused")


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UnavailableError(f"--host {host} --port {port}: {error.strerror}; choose another") from error
    with listening:
        yield listening
