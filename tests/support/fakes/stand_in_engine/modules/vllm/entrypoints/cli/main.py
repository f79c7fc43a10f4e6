"""`vllm serve`, as far as its command line goes."""

from argparse import ArgumentParser, BooleanOptionalAction

from tests.support.fakes.stand_in_engine.server import run


def main() -> None:
    parser = ArgumentParser("vllm serve")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    for name in ("served-model-name", "uds", "dtype", "quantization", "load-format", "tokenizer"):
        parser.add_argument(f"--{name}")
    for name in ("revision", "kv-cache-dtype", "tool-call-parser", "reasoning-parser"):
        parser.add_argument(f"--{name}")
    for name in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "seed"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("max-model-len", "max-num-seqs", "max-num-batched-tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--gpu-memory-utilization", type=float)
    for name in ("enable-prefix-caching", "enforce-eager", "enable-auto-tool-choice"):
        parser.add_argument(f"--{name}", action=BooleanOptionalAction)
    for name in ("enable-prompt-tokens-details", "disable-uvicorn-access-log"):
        parser.add_argument(f"--{name}", action=BooleanOptionalAction)
    parser.add_argument("--trust-remote-code", action=BooleanOptionalAction)
    run("vllm", parser.parse_args())


if __name__ == "__main__":
    main()
