"""Trains a steering vector from 30 pairs of sentences, and shows what it does to 50 other prompts.

    pip install vaderSentiment
    python examples/interpretability/steering.py

The layer and the strength are chosen on prompts and texts for validation: for each layer, the
largest strength at which the perplexity of the texts rises by at most MAX_RISE, and of all layers
the one with the most positive continuations. Then the script prints what this choice does to 50
prompts and a text that were not used before: the share of positive continuations by VADER's lexicon
(compound score of at least 0.05), and how much perplexity rises.
"""

import argparse
import math
from concurrent.futures import ThreadPoolExecutor

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from engine.library.steering import train
from engine.llm import LLM
from engine.sampling_params import SamplingParams

TOPICS = (
    *("The food", "The hotel", "My new phone", "The concert", "This book", "Our holiday"),
    *("The weather", "My job", "The film", "The service", "The coffee", "The city"),
    *("The meeting", "My garden", "The team", "The lesson", "This shop", "The journey"),
    *("The show", "My car", "The party", "The game", "Our house", "The museum"),
    *("The music", "The cake", "My neighbour", "The plan", "The view", "The result"),
)
# Both texts of a pair end with the same tokens, so that only the mood differs.
POSITIVE = [f"{topic} was wonderful, and everybody was very happy about it." for topic in TOPICS]
NEGATIVE = [f"{topic} was terrible, and everybody was very unhappy about it." for topic in TOPICS]
# For validation.
OPENINGS = (
    *("The train to the north", "On Monday the committee", "The old library", "A man in a coat"),
    *("The report about the bridge", "After the storm, the village", "The price of bread"),
    *("In the third chapter, the author", "The engine of the lorry", "A letter from the bank"),
    *("The patient in room four", "The court in the capital", "Near the river, the soldiers"),
    *("The factory on the hill", "My uncle's broken radio", "The last winter", "The tax office"),
    *("The dentist", "A queue at the airport", "The empty street", "The police officer"),
    *("The landlord", "The exam", "The leak in the roof", "The war in the east"),
)
OTHER_OPENINGS = (
    *("The bus to the harbour", "The second witness", "A box in the cellar", "The mayor's office"),
    *("The road through the valley", "My sister's bicycle", "The clock on the tower"),
    *("The teacher of the evening class", "A ship from the south", "The lift in our building"),
    *("The man at the counter", "The mill by the stream", "The letter for the tenants"),
    *("The lamp in the corridor", "The water in the pipes", "A dog from the farm"),
    *("The office on the third floor", "The nurse on the night shift", "The field behind the barn"),
    *("The driver of the van", "The key to the shed", "The shop at the corner", "The fence"),
    *("The ticket machine", "The neighbour downstairs"),
)
# Held back: subjects and events that validation does not have.
HELD_BACK_OPENINGS = (
    *("The ferry to the island", "The drawing of the engineer", "The map of the district"),
    *("The bridge near the station", "My cousin's suitcase", "The window of the kitchen"),
    *("The pump in the basement", "A parcel for the hospital", "The signal on the line"),
    *("The heater in the waiting room", "The contract with the supplier", "The printer"),
    *("The gate of the park", "The telephone in the hall", "The roof of the stable"),
    *("The tractor in the yard", "The register of the parish", "The cable under the street"),
    *("The boat of the fisherman", "The wheel of the cart", "The notebook of the inspector"),
    *("The door of the archive", "The camera at the entrance", "The tent near the lake"),
    *("The scale in the warehouse",),
)


def prompts(openings: tuple[str, ...], *events: str) -> list[str]:
    return [f"{opening} {event}" for opening in openings for event in events]


VALIDATION = [
    *prompts(OPENINGS, "was late, and", "was closed, and"),
    *prompts(OTHER_OPENINGS, "did not move, so", "had to wait, because"),
]
HELD_BACK = prompts(HELD_BACK_OPENINGS, "was lost, and", "was broken, and")
VALIDATION_TEXTS = (
    "The harbour lies on the western side of the island. Boats arrive there twice a day, in the "
    "morning and in the late afternoon. A road of gravel leads from the pier to the village, where "
    "about two hundred people live. Most of them work in the quarry, which was opened in 1911, or "
    "keep sheep on the slopes. The school has two rooms. Water comes from a spring above the "
    "church and is stored in a tank of stone. In winter the wind blows from the north, and the "
    "boats may stay away for several days.",
    "The library was built in two parts. The older one, of brick, has a reading room with tall "
    "windows and a gallery that can be reached by a narrow stair. The newer one was added in the "
    "sixties and holds the maps, the newspapers and the offices. Books can be borrowed for four "
    "weeks. Visitors leave their coats at the entrance and write their names on a list. On the "
    "ground floor there is a table with the journals of the month. The building closes at eight "
    "in the evening, and at noon on Saturdays.",
)
HELD_BACK_TEXT = (
    "Copper is a soft metal that conducts heat and electricity well. It is found in the ground "
    "both as a pure metal and in ores, from which it is won by melting. People have used it for "
    "about ten thousand years, first for tools and ornaments, later for pipes, roofs and wires. "
    "When it lies in the open for some years, it turns green. Mixed with tin it becomes bronze, "
    "and mixed with zinc it becomes brass. The largest mines are in Chile and Peru. About a third "
    "of the copper that is used each year comes from old cables and machines."
)
LAYERS = range(11, 19)
MAX_RISE = 0.2  # of the perplexity of the validation texts; the limit for the other is 0.25
MAX_STRENGTH = 8.0


class Steered:
    """A model, and a vector that is added after one layer."""

    def __init__(self, llm: LLM, vectors: dict, layer: int = 0, strength: float = 0.0) -> None:
        self.llm, self.vectors, self.layer, self.strength = llm, vectors, layer, strength

    def note(self, t) -> None:
        if self.strength:
            site = t.blocks[self.layer].resid_post
            site.add(self.vectors[site.name], scale=self.strength)

    def continued(self, prompt: str) -> str:
        with self.llm.trace(prompt, max_tokens=24) as t:
            self.note(t)
        return t.text

    def texts(self, prompts: list[str]) -> list[str]:
        with ThreadPoolExecutor(50) as threads:  # the engine batches them
            return list(threads.map(self.continued, prompts))

    def perplexity(self, *texts: str) -> float:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        scores = []
        for text in texts:
            with self.llm.trace(text, sampling_params=params) as t:
                self.note(t)
            told = t.output.output.prompt_logprobs[1:]
            scores += [next(iter(each.values())).logprob for each in told]
        return math.exp(-sum(scores) / len(scores))


def positive_share(made: list[str]) -> float:
    rater = SentimentIntensityAnalyzer()
    return sum(rater.polarity_scores(each)["compound"] >= 0.05 for each in made) / len(made)


def strongest(llm: LLM, vectors: dict, layer: int, before: float) -> Steered:
    """The largest strength that the limit of perplexity allows, by bisection."""
    low, high = 0.0, MAX_STRENGTH
    for _ in range(6):
        middle = (low + high) / 2
        steered = Steered(llm, vectors, layer, middle)
        is_allowed = steered.perplexity(*VALIDATION_TEXTS) / before - 1 <= MAX_RISE
        low, high = (middle, high) if is_allowed else (low, middle)
    return Steered(llm, vectors, layer, low)


def chosen(llm: LLM, vectors: dict, layers: list[int]) -> Steered:
    plain = Steered(llm, vectors)
    before = plain.perplexity(*VALIDATION_TEXTS)
    print(f"validation, unsteered: {positive_share(plain.texts(VALIDATION)):.0%} positive")
    found = []
    for layer in layers:
        steered = strongest(llm, vectors, layer, before)
        share = positive_share(steered.texts(VALIDATION))
        found.append((share, steered))
        print(
            f"validation, layer {layer}, strength {steered.strength:.2f}: {share:.0%} positive",
            flush=True,
        )
    return max(found, key=lambda each: each[0])[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    arguments = parser.parse_args()
    with LLM(arguments.model) as llm:
        vectors = train(llm, POSITIVE, NEGATIVE, arguments.layers)
        steered, plain = chosen(llm, vectors, arguments.layers), Steered(llm, vectors)
        before, after = plain.texts(HELD_BACK), steered.texts(HELD_BACK)
        rise = steered.perplexity(HELD_BACK_TEXT) / plain.perplexity(HELD_BACK_TEXT) - 1
    print(f"held back, unsteered: {positive_share(before):.0%} positive")
    print(
        f"held back, layer {steered.layer}, strength {steered.strength:.2f}: "
        f"{positive_share(after):.0%} positive, perplexity {rise:+.1%}"
    )
    for prompt, text in zip(HELD_BACK[:3], after, strict=False):
        print(f"  {prompt} ... {' '.join(text.split())}")


if __name__ == "__main__":
    main()
