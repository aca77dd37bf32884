"""Opens a model, listens, and stops without cutting answers off."""

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import uvicorn

from trt_nvfp4.builder.components.manifest import FILE
from trt_nvfp4.builder.components.picture_slots import PictureSlots
from trt_nvfp4.builder.errors import UnavailableError, UsageError
from trt_nvfp4.builder.generate.drafts.drafter import Drafter
from trt_nvfp4.builder.generate.drafts.open import NGRAM, NONE, check_draft, open_drafter
from trt_nvfp4.builder.generate.open import opened, tokenizer_folder
from trt_nvfp4.builder.generate.runner import SlotRunner
from trt_nvfp4.builder.generate.tokenizer import Tokenizer
from trt_nvfp4.builder.parallel.launched import Launched
from trt_nvfp4.builder.serve.app import Api
from trt_nvfp4.builder.serve.engine import Engine
from trt_nvfp4.builder.serve.guard import LARGEST_BODY, LARGEST_BODY_WITH_IMAGES, Guard, read_keys
from trt_nvfp4.builder.serve.logs import log
from trt_nvfp4.builder.serve.prompts import Prompts
from trt_nvfp4.builder.serve.serve_options import ServeOptions
from trt_nvfp4.builder.serve.service import Service

# Seconds that an idle connection stays open.
_IDLE = 30
_MOST_CONNECTIONS = 2048
# Seconds that the decoder's thread waits while the event loop holds the interpreter. Steps may take less than the 5 ms
# of Python's default.
_SWITCH = 1e-4
_SLOTS = 8


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
    sys.setswitchinterval(_SWITCH)
    with ExitStack() as stack:
        listening = stack.enter_context(_listening(options.host, options.port))
        runner = _opened(options, stack)
        slots_with_pictures = runner if isinstance(runner, PictureSlots) else None
        preprocessing = None if slots_with_pictures is None else slots_with_pictures.preprocessing
        prompts = Prompts(options.tokenizer or tokenizer_folder(options.model), preprocessing)
        stack.callback(prompts.close)
        slots = options.slots or min(_SLOTS, runner.decoder.max_batch)
        engine = Engine(runner, slots, options.max_queue, _drafter(options, runner, stack))
        stack.callback(engine.stop)
        prompts.wait()
        name = options.name or options.model.resolve().name
        service = Service(engine, tokenizer, prompts, name, slots_with_pictures)
        largest = LARGEST_BODY if slots_with_pictures is None else LARGEST_BODY_WITH_IMAGES
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
        log("ready", address=address, model=name, runs_on=runner.name, slots=slots, capacity=engine.scheduler.capacity)
        _Server(config).run(sockets=[listening])
        log("stopped")


def _opened(options: ServeOptions, stack: ExitStack) -> SlotRunner:
    if not (options.model / FILE).is_file():
        return opened(options.model, stack, runner=options.runner)[0]
    found = PictureSlots(options.model, options.runner)
    stack.callback(found.close)
    return found


def _drafter(options: ServeOptions, runner: SlotRunner, stack: ExitStack) -> Drafter | None:
    """As `generate` takes it; none for a model with recurrent states, and n-grams only for one of parts."""
    by_model = options.draft not in (None, NGRAM, NONE)
    if runner.decoder.states or (by_model and isinstance(runner, PictureSlots)):
        if by_model:
            raise UsageError(f"--draft {options.draft}: {runner.name} takes none in serve; leave it out")
        return None
    folder = options.tokenizer or tokenizer_folder(options.model)
    return open_drafter(options.draft, options.model, folder, runner, stack, options.runner)


class _Server(uvicorn.Server):
    """SIGTERM and SIGINT end it with exit code 0: they are what stops a server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
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
