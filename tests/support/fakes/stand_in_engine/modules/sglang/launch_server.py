"""`python -m sglang.launch_server`, as far as its command line goes."""

from argparse import ArgumentParser

from tests.support.fakes.stand_in_engine.server import run


def main() -> None:
    parser = ArgumentParser("sglang.launch_server")
    parser.add_argument("--model-path", dest="model", required=True)
    for name in ("served-model-name", "dtype", "quantization", "load-format", "tokenizer-path"):
        parser.add_argument(f"--{name}")
    for name in ("revision", "kv-cache-dtype", "device", "attention-backend", "log-level-http"):
        parser.add_argument(f"--{name}")
    for name in ("chat-template", "tool-call-parser", "reasoning-parser"):
        parser.add_argument(f"--{name}")
    for name in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("max-running-requests", "chunked-prefill-size", "random-seed"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--context-length", dest="max_model_len", type=int)
    parser.add_argument("--mem-fraction-static", type=float)
    for name in ("disable-radix-cache", "enable-cache-report", "trust-remote-code"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.set_defaults(uds=None)
    run("sglang", parser.parse_args())


if __name__ == "__main__":
    main()
