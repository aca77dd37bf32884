"""trt-nvfp4 serve: a language model behind OpenAI's HTTP API."""

from typing import Any

from trt_nvfp4.builder.cli.command import Command
from trt_nvfp4.builder.cli.text_models import check_gives_text
from trt_nvfp4.builder.errors import UnavailableError
from trt_nvfp4.builder.serve.serve_options import ServeOptions


def serve(given: dict[str, Any], as_json: bool) -> None:
    """Serve a language model to many users at once, with OpenAI's HTTP API and a page to try it.

    Requests join and leave a running batch. The log is JSON, a line for each request, on stderr. SIGTERM lets running
    requests end. With --json, nothing else is printed.

    Example: trt-nvfp4 serve model.engine --port 8000 --api-key-file keys.txt
    """
    options = ServeOptions(**given)
    check_gives_text(options.model)  # before imports that take seconds
    try:
        from trt_nvfp4.builder.serve.server import serve as run
    except ImportError as error:
        raise UnavailableError(f"a server needs further packages: pip install 'trt-nvfp4[serve]' ({error})") from error
    run(options)


app = Command("serve", ServeOptions, serve, "; give one model")

if __name__ == "__main__":
    app()
