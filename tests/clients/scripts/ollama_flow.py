"""What users of Ollama's own client do, against the server of the first argument with the model of
the second. Prints what came back as JSON.
"""

import json
import sys

import ollama

client, model = ollama.Client(host=sys.argv[1]), sys.argv[2]
HELLO = [{"role": "user", "content": "Say hello."}]
OPTIONS = {"temperature": 0, "num_predict": 8, "num_ctx": 2048}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
}


def missing() -> int:
    try:
        client.chat(model="absent", messages=HELLO)
    except ollama.ResponseError as error:
        return error.status_code
    return 0


def pulled() -> list[str]:
    return [each.status for each in client.pull(model, stream=True)]


def main() -> None:
    whole = client.chat(model=model, messages=HELLO, options=OPTIONS)
    parts = list(client.chat(model=model, messages=HELLO, options=OPTIONS, stream=True))
    text = client.generate(model=model, prompt="One, two,", raw=True, options=OPTIONS)
    formed = client.chat(model=model, messages=HELLO, format=SCHEMA, options={"temperature": 0})
    scored = client.generate(model=model, prompt="a", logprobs=True, options=OPTIONS)
    client.create(model="pirate", from_=model, system="You are a pirate.", parameters=OPTIONS)
    client.copy("pirate", "sailor")
    names = [each.model for each in client.list().models]
    said = {
        "whole": whole.message.content,
        "streamed": "".join(part.message.content for part in parts),
        "reason": parts[-1].done_reason,
        "counts": [whole.eval_count, parts[-1].eval_count],
        "text": text.response,
        "formed": json.loads(formed.message.content),
        "scored": len(scored.logprobs),
        "names": names,
        "system": client.show("sailor").modelfile,
        "running": [each.context_length for each in client.ps().models],
        "embedded": [len(each) for each in client.embed(model=model, input=["a", "b"]).embeddings],
        "old": len(client.embeddings(model=model, prompt="a").embedding),
        "missing": missing(),
        "pulled": pulled(),
        "pirate": client.chat(model="pirate", messages=HELLO).message.content,
        "deleted": [client.delete(name).status for name in ("pirate", "sailor")],
        "left": [each.model for each in client.list().models],
    }
    print(json.dumps(said))


main()
