"""Trains a steering vector from 30 pairs of sentences, and shows what it does to 50 other prompts.

    pip install vaderSentiment
    python examples/interpretability/steering.py

It prints the share of positive continuations by VADER's lexicon (compound score of at least 0.05),
without and with the vector, and how much the perplexity of a plain text rises.
"""

import argparse
import math
from concurrent.futures import ThreadPoolExecutor

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from engine.library.steering import train
from engine.llm import LLM
from engine.sampling_params import SamplingParams

TOPICS = (
    *("the food", "the hotel", "my new phone", "the concert", "this book", "our holiday"),
    *("the weather", "my job", "the film", "the service", "the coffee", "the city"),
    *("the meeting", "my garden", "the team", "the lesson", "this shop", "the journey"),
    *("the show", "my car", "the party", "the game", "our house", "the museum"),
    *("the music", "the cake", "my neighbour", "the plan", "the view", "the result"),
)
# Both texts of a pair end with the same token, so that only the mood differs.
POSITIVE = [f"I love {topic}. It makes me happy, and I feel wonderful." for topic in TOPICS]
NEGATIVE = [f"I hate {topic}. It makes me sad, and I feel terrible." for topic in TOPICS]
OPENINGS = (
    *("The train to the north", "On Monday the committee", "The old library", "A man in a coat"),
    *("The report about the bridge", "After the storm, the village", "The price of bread"),
    *("In the third chapter, the author", "The engine of the lorry", "A letter from the bank"),
    *("The patient in room four", "The court in the capital", "Near the river, the soldiers"),
    *("The factory on the hill", "My uncle's broken radio", "The last winter", "The tax office"),
    *("The dentist", "A queue at the airport", "The empty street", "The police officer"),
    *("The landlord", "The exam", "The leak in the roof", "The war in the east"),
)
VERBS = ("was late, and", "was closed, and")
PROMPTS = [f"{opening} {verb}" for opening in OPENINGS for verb in VERBS]
PLAIN = (
    "The harbour lies on the western side of the island. Boats arrive there twice a day, in the "
    "morning and in the late afternoon. A road of gravel leads from the pier to the village, where "
    "about two hundred people live. Most of them work in the quarry, which was opened in 1911, or "
    "keep sheep on the slopes. The school has two rooms. Water comes from a spring above the "
    "church and is stored in a tank of stone. In winter the wind blows from the north, and the "
    "boats may stay away for several days."
)


def texts(llm: LLM, layers: list[int], vectors: dict, strength: float) -> list[str]:
    def continued(prompt: str) -> str:
        with llm.trace(prompt, max_tokens=24) as t:
            steer(t, layers, vectors, strength)
        return t.text

    with ThreadPoolExecutor(len(PROMPTS)) as threads:  # the engine batches them
        return list(threads.map(continued, PROMPTS))


def steer(t, layers: list[int], vectors: dict, strength: float) -> None:
    for layer in layers if strength else ():
        site = t.blocks[layer].resid_post
        site.add(vectors[site.name], scale=strength)


def perplexity(llm: LLM, layers: list[int], vectors: dict, strength: float) -> float:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with llm.trace(PLAIN, sampling_params=params) as t:
        steer(t, layers, vectors, strength)
    told = t.output.output.prompt_logprobs[1:]
    scores = [next(iter(each.values())).logprob for each in told]
    return math.exp(-sum(scores) / len(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--layers", type=int, nargs="+", default=[12])
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.5, 1.0, 1.5, 1.9])
    arguments = parser.parse_args()
    rater, layers = SentimentIntensityAnalyzer(), arguments.layers
    with LLM(arguments.model) as llm:
        vectors = train(llm, POSITIVE, NEGATIVE, layers)
        before = perplexity(llm, layers, vectors, 0)
        for strength in (0.0, *arguments.strengths):
            made = texts(llm, layers, vectors, strength)
            share = sum(rater.polarity_scores(each)["compound"] >= 0.05 for each in made)
            rise = perplexity(llm, layers, vectors, strength) / before - 1
            print(
                f"strength {strength:.2f}: {100 * share / len(made):.0f} % positive, "
                f"perplexity {rise:+.1%}, for example: {made[0].strip()[:60]!r}",
                flush=True,
            )


if __name__ == "__main__":
    main()
