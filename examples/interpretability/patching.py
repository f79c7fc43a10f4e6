"""Activation patching: which layer carries the country, in "The capital of ... is"?

    python examples/interpretability/patching.py

Two prompts differ in one word. For each layer, the residual stream at the last position is replaced
by that of the other prompt. Where the answer turns into the other one, the layer before it has
already moved the fact to the last position.
"""

import argparse

from engine.llm import LLM

CLEAN, OTHER = "The capital of France is", "The capital of Italy is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args()
    with LLM(args.model) as llm:
        with llm.trace(OTHER) as source:
            saved = [
                source.blocks[layer].resid_post.save("last") for layer in range(llm.num_layers)
            ]
        with llm.trace(CLEAN) as plain:
            plain.lens([llm.num_layers - 1], top=1)
        print(f"{CLEAN} ->{plain.text!r}   {OTHER} ->{source.text!r}")
        for layer, value in enumerate(saved):
            with llm.trace(CLEAN) as t:
                t.blocks[layer].resid_post.patch(value, source="last", positions=[-1])
            mark = (
                "patched" if t.text == source.text else "unchanged" if t.text == plain.text else ""
            )
            print(f"layer {layer:3}: {t.text!r:12} {mark}")


if __name__ == "__main__":
    main()
