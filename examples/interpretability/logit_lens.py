"""The logit lens: what the model would say if it ended after each layer.

python examples/interpretability/logit_lens.py "The capital of France is"
python examples/interpretability/logit_lens.py --url http://127.0.0.1:8080 "Two plus two is"
"""

import argparse

from engine.library.interp import Remote
from engine.llm import LLM

WIDTH = 40


def show(model: LLM | Remote, prompt: str) -> None:
    with model.trace(prompt) as t:
        t.lens("all", top=1, positions="last")
    for row in t.output.lens:
        token, logprob = row["top"][0]
        bar = "#" * max(1, round(WIDTH * 2.718281828**logprob))
        print(f"layer {row['layer']:3}  {bar:{WIDTH}}  {t.output.token_text(token)!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--url", help="a server of this engine, instead of a model here")
    args = parser.parse_args()
    if args.url:
        show(Remote(args.url), args.prompt)
        return
    with LLM(args.model) as llm:
        show(llm, args.prompt)


if __name__ == "__main__":
    main()
