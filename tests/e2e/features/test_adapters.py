"""LoRA adapters as a user meets them: in a configuration file with backends, and over HTTP."""

from pathlib import Path

import httpx
import openai

from tests.support.files.lora_files import peft_folder
from tests.support.servers.served import serve

CONFIG = """
[model]
adapter_directory = "FOLDER"
[backends.fast]
kind = "native"
model = "smollm2-135m-instruct"
[models.smol]
backends = ["fast"]
[adapters.tuned]
path = "tuned"
"""
SHAPES = {f"model.layers.{layer}.mlp.down_proj": (576, 1536) for layer in range(30)}


def test_adapters_of_the_config_file_are_served_through_the_router(
    default_model: Path, tmp_path: Path
) -> None:
    folders = [
        peft_folder(tmp_path / name, SHAPES, rank=4, seed=seed, std=0.2)
        for seed, name in enumerate(("tuned", "other"))
    ]
    config = tmp_path / "engine.toml"
    config.write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    with serve("--config", str(config)) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")

        def answer(model: str) -> str:
            made = client.completions.create(
                model=model, prompt="The capital of France is", max_tokens=8, temperature=0
            )
            assert made.model == model
            return made.choices[0].text

        def post(name: str, **body: str) -> httpx.Response:
            return httpx.post(f"{served.url}/v1/{name}_lora_adapter", json=body, timeout=60)

        parents = {each.id: getattr(each, "parent", None) for each in client.models.list()}
        assert parents == {"smol": None, "tuned": "smol"}
        base = answer("smol")
        assert answer("tuned") != base == answer("smol")
        assert post("load", lora_name="late", lora_path=str(folders[1])).is_success
        assert answer("late") not in (base, answer("tuned"))
        assert post("unload", lora_name="late").is_success
        assert post("unload", lora_name="late").status_code == 404
        stream = client.completions.create(
            model="smol",
            prompt="Once",
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        for path, said in broken_adapters(tmp_path):
            refused = post("load", lora_name="x", lora_path=str(path))
            told = refused.json()["error"]["message"]
            assert refused.status_code == 400 and said in told and "\n" not in told, told
        assert [each.choices[0].finish_reason for each in stream][-1] == "length"
        assert answer("smol") == base


def broken_adapters(folder: Path) -> list[tuple[Path, str]]:
    """Paths of adapters that can't be served, each with a part of the reason."""
    pickled = peft_folder(folder / "pickled", SHAPES)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    other = {"model.layers.0.mlp.down_proj": (512, 1024)}
    return [
        (folder, "adapter"),
        (pickled, "is a pickle"),
        (peft_folder(folder / "another", other), "another base model"),
        (peft_folder(folder / "large", SHAPES, rank=300), "rank 300"),
        (peft_folder(folder / "nan", SHAPES, std=float("nan")), "NaN"),
    ]
