"""Models that read images against Transformers: the image encoder, and whole generations under
schedules that batch, chunk, share and preempt.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.conversion.convert import convert
from engine.core.interfaces.request import Deltas, GenerateRequest, ImageInput, SamplingParams
from engine.frontend.text_model import load_text
from engine.ipc.options import IMAGE_ENCODERS
from engine.native.execution import build as native_build
from engine.runtime.block_pool import BlockPool
from engine.runtime.budget import StepBudget
from engine.runtime.groups.windows import window_group
from engine.runtime.kv_cache import KVCache
from engine.runtime.loop import EngineLoop
from engine.runtime.model_runner import RunnerConfig
from engine.runtime.radix_cache import RadixCache
from engine.runtime.requests.images import ImageStore
from engine.runtime.samplers import prompt_logprobs
from engine.runtime.scheduler import Scheduler
from engine.torch.execution import build as torch_build
from engine.weights.model import open_model
from tests.parity import tiny_models, tiny_vision
from tests.support.toy_engine.engine import ListChannel

NUM_NEW = 8
FRAMEWORKS = {"torch": torch_build, "native": native_build}
SCHEDULES = {
    "together": {"num_blocks": 400, "max_slots": 16, "budget": 512},
    "in small chunks": {"num_blocks": 400, "max_slots": 4, "budget": 7},
    "without sharing": {"num_blocks": 400, "max_slots": 16, "budget": 64, "sharing": False},
    "in a pool too small": {"num_blocks": 15, "max_slots": 8, "budget": 64},
}


@pytest.fixture(scope="module", params=tiny_vision.MODELS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_vision.save(request.param, tmp_path_factory.mktemp("vision"))


def prompts(unit: int | None) -> list[tuple[list[int], list[ImageInput]]]:
    """Shared texts and shared pictures, a picture twice, and no picture at all. If `unit` is given,
    the pictures have different sizes.
    """
    cat = tiny_vision.picture(1)
    dog = tiny_vision.picture(2) if unit is None else tiny_vision.picture(2, 24, 8)
    begin, ask, more = (tiny_models.text(length, seed) for seed, length in enumerate((9, 5, 3)))
    parts: list[list[Any]] = [
        [begin, cat, ask],
        [begin, cat, more],
        [begin, dog, ask],
        [cat, ask, dog, more, cat, ask],
        [begin, ask],
        [begin, cat, dog, ask],
    ]
    return [tiny_vision.prompt(*each, unit=unit) for each in parts]


def unit_of(model: Any) -> int | None:
    return 8 if model.config.model_type == "qwen2_5_vl" else None


def frameworks(model: Any) -> list[str]:
    """The frameworks that read images with this model."""
    kind = {"smolvlm": "idefics3"}.get(model.config.model_type, model.config.model_type)
    return [name for name, kinds in IMAGE_ENCODERS.items() if kind in kinds]


@pytest.fixture(scope="module")
def expected(tiny: Any) -> list[list[int]]:
    """What `generate` answers to each of the prompts."""
    model, _ = tiny
    answers = []
    for ids, images in prompts(unit_of(model)):
        given = tiny_vision.arguments(model, ids, images)
        with torch.no_grad():
            theirs = model.generate(**given, max_new_tokens=NUM_NEW, do_sample=False)
        answers.append(theirs[0, len(ids) :].tolist())
    return answers


class Run:
    """All prompts at once, or one after the other, through the real runtime."""

    def __init__(
        self,
        path: Path,
        *,
        num_blocks: int,
        max_slots: int,
        budget: int,
        sharing: bool = True,
        framework: str = "torch",
    ) -> None:
        source, build = open_model(path), FRAMEWORKS[framework]
        block_size = 16 if framework == "native" else 4
        has_windows = any(layer.window for layer in source.config.layers)
        config = RunnerConfig(
            device="cpu",
            dtype="float32",
            block_size=block_size,
            num_blocks=num_blocks + 1,
            num_window_blocks=num_blocks + 1 if has_windows else 0,
            max_slots=max_slots,
            max_seq_len=128,
            num_threads=1,
        )
        runner = build.build_runner(source, config)
        vision = source.config.vision
        assert vision is not None
        pool = BlockPool(config.num_blocks)
        windows = window_group(runner.spec, max(budget, 4 + max_slots))
        groups = [] if windows is None else [windows]
        radix = RadixCache(pool, block_size, columns=[group.column for group in groups])
        self.kv = KVCache(pool, radix, block_size, sharing=sharing, groups=groups)
        self.scheduler = Scheduler(self.kv, max_slots, max(budget, 4 + max_slots))
        self.channel = ListChannel()
        self.images = ImageStore(
            build.build_image_encoder(source, config),
            two_way_tokens=vision.two_way_tokens,
            grid_unit=vision.grid_unit,
        )
        steps = StepBudget(budget, max_slots)
        self.loop = EngineLoop(
            self.scheduler, runner, self.channel, steps, 1000, images=self.images
        )

    def answers(self, *asked: tuple[list[int], list[ImageInput]], **fields: Any) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, **fields)
        self.channel.inbox.extend(
            GenerateRequest(
                request_id=str(number), prompt=tuple(ids), params=params, images=tuple(images)
            )
            for number, (ids, images) in enumerate(asked)
        )
        self.channel.outbox.clear()
        self.loop.turn(0.0)
        while self.scheduler.has_work or self.loop._admission.num_pending:
            self.loop.turn(0.0)
            self.scheduler.check()
        deltas = [d for m in self.channel.outbox if isinstance(m, Deltas) for d in m.deltas]
        assert all(delta.finish_reason in (None, "length") for delta in deltas), deltas
        return [
            [token for d in deltas if d.request_id == str(number) for token in d.token_ids]
            for number in range(len(asked))
        ]


def test_the_image_encoder_equals_transformers(tiny: Any) -> None:
    model, path = tiny
    source, pixels = open_model(path), tiny_vision.picture(3)
    config = RunnerConfig("cpu", "float32", 4, 8, 1, 128, 1)
    given = tiny_vision.arguments(model, *tiny_vision.prompt(pixels, [5], unit=unit_of(model)))
    more = {name: value for name, value in given.items() if name == "image_grid_thw"}
    with torch.no_grad():
        theirs = model.get_image_features(given["pixel_values"], **more).pooler_output
    expected = torch.cat(list(theirs)).reshape(-1, 48).numpy()
    for name in frameworks(model):
        build = FRAMEWORKS[name]
        embeds = build.build_image_encoder(source, config).encode(pixels)
        assert embeds.dtype == np.float32
        np.testing.assert_allclose(embeds, expected, atol=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_generations_with_images_equal_transformers(
    tiny: Any, expected: list[list[int]], schedule: str
) -> None:
    model, path = tiny
    asked = prompts(unit_of(model))
    settings = dict(SCHEDULES[schedule])
    if schedule == "in a pool too small" and unit_of(model) is not None:
        settings["num_blocks"] = 25  # its pictures have more tokens
    for framework in frameworks(model):
        run = Run(path, framework=framework, **settings)
        assert run.answers(*asked) == expected, framework
        assert run.images.num_encoded == 2
        if schedule == "in a pool too small" and framework == "torch":
            assert run.scheduler.num_preemptions > 0


def test_a_cached_image_prefix_is_found_by_the_images_content(tiny: Any) -> None:
    """The tokens of all images are the same, so only their content can tell them apart."""
    model, path = tiny
    run = Run(path, num_blocks=400, max_slots=4, budget=64)
    text = tiny_models.text(6, 1)
    pictures = [tiny_vision.picture(seed, 16, 16) for seed in (1, 2)]
    if unit_of(model) is None:
        pictures = [tiny_vision.picture(seed) for seed in (1, 2)]
    cat, dog = (tiny_vision.prompt(text, each, text, unit=unit_of(model)) for each in pictures)
    first = run.answers(cat)
    hits = run.kv.num_hit
    assert run.answers(cat) == first
    assert run.kv.num_hit - hits == 16  # all full blocks of its 18 tokens
    hits = run.kv.num_hit
    assert run.answers(dog) != first
    assert run.kv.num_hit - hits == 4  # the text before the image
    assert run.images.num_encoded == 2


def test_a_vision_config_with_text_settings_at_the_top_level_is_read(tmp_path: Path) -> None:
    """The files that Qwen published have all settings of the text model at the top."""
    _, path = tiny_vision.save("qwen2_5_vl", tmp_path)
    before = open_model(path)
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "model_type": "qwen2_5_vl"}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (path / "config.json").write_text(json.dumps({**text, **config}))
    assert open_model(path).config == before.config


def write_mmproj(path: Path, model: Any) -> None:
    """An image encoder as a GGUF file, with names of the `gguf` package and in its manner."""
    config = model.config
    vision, kind = config.vision_config, {"gemma3": "gemma3"}.get(config.model_type, "idefics3")
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_projector_type(kind)
    writer.add_vision_projection_dim(config.text_config.hidden_size)
    writer.add_vision_image_size(vision.image_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_projector_scale_factor(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
    tower = getattr(model.model, "vision_tower" if kind == "gemma3" else "vision_model")
    prefix = "vision_tower.vision_model." if kind == "gemma3" else "model.vision_model."
    stored = {prefix + name: value for name, value in tower.state_dict().items()}
    if kind == "gemma3":
        projector = model.model.multi_modal_projector
        stored["multi_modal_projector.mm_input_projection.weight"] = (
            projector.mm_input_projection_weight
        )
        norm = projector.mm_soft_emb_norm.weight
        stored["multi_modal_projector.mm_soft_emb_norm.weight"] = norm + 1
    else:
        weight = model.model.connector.modality_projection.proj.weight
        stored["model.connector.modality_projection.proj.weight"] = weight
    for name, value in stored.items():
        if ".head." not in name and "position_ids" not in name:
            theirs = names.get_name(name, (".weight", ".bias"))
            assert theirs is not None, name
            writer.add_tensor(theirs, value.detach().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["smolvlm", "gemma3"])
def test_a_gguf_model_finds_its_mmproj_file_in_the_same_folder(name: str, tmp_path: Path) -> None:
    model, folder = tiny_vision.servable(name, tmp_path)
    path = tmp_path / "gguf" / "model.gguf"
    path.parent.mkdir()
    convert(folder, path)
    assert open_model(path).config.vision is None
    write_mmproj(path.with_name("mmproj-f32.gguf"), model)
    ours, theirs = open_model(path), open_model(folder)
    assert ours.config.vision is not None and theirs.config.vision is not None
    # GGUF has the number as float32.
    exact = replace(ours.config.vision, norm_eps=theirs.config.vision.norm_eps)
    assert exact == theirs.config.vision
    assert ours.vision_weights.keys() == theirs.vision_weights.keys()
    for name, weight in theirs.vision_weights.items():
        values = ours.vision_weights[name].numpy()
        np.testing.assert_allclose(values, weight.numpy(), atol=1e-6, err_msg=name)
    assert open_model(path.parent).config == ours.config
    assert load_text(path).config.vision == ours.config.vision
    # Of two encoders, it is not clear which one belongs to the model.
    write_mmproj(path.with_name("mmproj-other.gguf"), model)
    assert open_model(path).config.vision is None


def test_the_mmproj_file_of_another_model_is_ignored(tmp_path: Path) -> None:
    _, folder = tiny_vision.servable("smolvlm", tmp_path)
    other, _ = tiny_vision.save("gemma3", tmp_path)
    path = tmp_path / "model.gguf"
    convert(folder, path)
    write_mmproj(tmp_path / "mmproj.gguf", other)
    assert open_model(path).config.vision is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_prompt_logprobs_beside_images_equal_transformers(
    tiny: Any, expected: list[list[int]], schedule: str
) -> None:
    """Tokens of images count as the token that stands for them in the prompt, as in vLLM."""
    model, path = tiny
    asked = prompts(unit_of(model))
    settings = dict(SCHEDULES[schedule])
    if schedule == "in a pool too small":
        settings["num_blocks"] = 40  # a sequence that scores its prompt shares no blocks
    for framework in frameworks(model):
        run = Run(path, framework=framework, **settings)
        for _ in range(2):  # the second time, the images and their prefixes are cached
            assert run.answers(*asked, score_prompt=True, logprobs=2) == expected, framework
            firsts = {
                delta.request_id: delta.prompt_logprobs
                for message in run.channel.outbox
                if isinstance(message, Deltas)
                for delta in message.deltas
                if delta.prompt_logprobs is not None
            }
            for number, (ids, images) in enumerate(asked):
                with torch.no_grad():
                    logits = model(**tiny_vision.arguments(model, ids, images)).logits[0]
                theirs = torch.log_softmax(logits.float(), -1)[:-1]
                ours = firsts[str(number)]
                own = theirs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
                np.testing.assert_allclose([each.logprob for each in ours], own, atol=2e-3)
                best = theirs.topk(2).values
                np.testing.assert_allclose([e.top_logprobs for e in ours], best, atol=2e-3)


@pytest.mark.parametrize("tiny", ["gemma3"], indirect=True)
def test_an_image_may_have_more_tokens_than_one_step_scores(
    tiny: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (prompt_logprobs, native_build):
        monkeypatch.setattr(module, "MAX_SCORED", 1)
    model, path = tiny
    asked = prompts(unit_of(model))
    for framework in frameworks(model):
        run = Run(path, framework=framework, num_blocks=400, max_slots=2, budget=512)
        assert run.answers(*asked, score_prompt=True) == expected, framework
