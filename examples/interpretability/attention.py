"""Attention patterns: where the last token looks.

python examples/interpretability/attention.py "The cat sat on the mat because the cat" --layer 5
"""

import argparse

from engine.llm import LLM

SHADES = " .:-=+*#%@"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The cat sat on the mat because the cat")
    parser.add_argument("--layer", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args()
    with LLM(args.model) as llm:
        with llm.trace(args.prompt) as t:
            t.attention([args.layer], positions="all")
        weights = t.output.attention(args.layer)  # (positions, heads, earlier positions)
        words = [t.output.token_text(each) for each in t.output.token_ids[: t.output.num_prompt]]
    for head in range(weights.shape[1]):
        print(f"head {head}")
        for position, word in enumerate(words):
            row = weights[position, head, : position + 1]
            print(f"  {word!r:>14} {''.join(SHADES[min(9, int(10 * w))] for w in row)}")


if __name__ == "__main__":
    main()
