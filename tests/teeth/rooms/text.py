"""Mutations between tokens and text, and of stop strings."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "stop strings: the last character of a beginning is let go",
        "engine.core.text.detokenizer",
        "for char in text[:-1])",
        "for char in text[:-2])",
        "tests/property/test_detokenizer.py::test_a_stop_string_in_two_pieces_is_never_shown",
    ),
    Mutation(
        "stop strings: the first of the list wins",
        "engine.core.text.detokenizer",
        "_, start, self.stopped = min(found)",
        "_, start, self.stopped = found[0]",
        "tests/property/test_detokenizer.py::test_stop_strings_wherever_the_text_is_cut",
    ),
    Mutation(
        "stop strings: a beginning is shown but for its last character",
        "engine.core.text.detokenizer",
        "range(min(len(stop) - 1, len(text)), longest, -1)",
        "range(min(len(stop) - 2, len(text)), longest, -1)",
        "tests/property/test_detokenizer.py::test_stop_strings_wherever_the_text_is_cut",
    ),
    Mutation(
        "detokenizer: every space is the first",
        "engine.core.text.detokenizer",
        "            self._drop_space = False\n",
        "",
        "tests/property/test_detokenizer.py::test_only_the_first_space_of_a_text_is_dropped",
    ),
    Mutation(
        "detokenizer: a text that goes on loses its space",
        "engine.core.text.detokenizer",
        "drops_leading_space and not continuation",
        "drops_leading_space",
        "tests/property/test_detokenizer.py::test_only_the_first_space_of_a_text_is_dropped",
    ),
    Mutation(
        "word pieces: a piece that continues a word begins one",
        "engine.core.text.tokenizer_tables",
        'f"##{piece}"',
        "piece",
        "tests/parity/test_tokenizers.py::test_word_piece_matches_the_library",
    ),
    Mutation(
        "unigram: runs of spaces are kept",
        "engine.core.text.tokenizer_tables",
        'normalizers.Replace(Regex(" {2,}"), " ")',
        'normalizers.Replace(Regex(" {9,}"), " ")',
        "tests/parity/test_tokenizers.py::test_unigram_matches_sentencepiece",
    ),
    Mutation(
        "character maps: a trie may point outside itself",
        "engine.core.text.charsmap",
        "if base | 0xFF >= len(units):",
        "if False:",
        "tests/unit/test_tokenizer_mutations.py::test_damaged_character_map_in_tokenizer_json",
    ),
    Mutation(
        "ranks: tokens take the ids of control tokens",
        "engine.core.text.tokenizer_ranks",
        "first_id + rank for",
        "rank for",
        "tests/parity/test_tokenizers.py::test_tekken_matches_tiktoken",
    ),
    Mutation(
        "decoders: any strip counts as one leading space",
        "engine.core.text.tokenizer_json",
        'content=" ", start=1, stop=0)',
        "stop=0)",
        "tests/unit/test_tokenizer_mutations.py::test_decoders_that_change_the_text_are_refused",
    ),
    Mutation(
        "added tokens: marks of spaces are shown",
        "engine.core.text.tokenizer",
        "(token_id in parts.literal_ids and parts.byte_level)",
        "token_id in parts.literal_ids",
        "tests/unit/test_tokenizer.py::test_runs_of_spaces_survive_the_decoders_of_a_directory",
    ),
    Mutation(
        "fit: the KV cache takes no memory",
        "engine.core.store.fit",
        "entry.kv_bytes * tokens + ",
        "",
        "tests/unit/test_fit.py::test_the_kv_cache_counts",
    ),
]
