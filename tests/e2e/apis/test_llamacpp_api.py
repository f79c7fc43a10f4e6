"""llama.cpp's endpoints of `engine serve` on the real model, as its README calls them."""

import httpx

QUESTION = [{"role": "user", "content": "Name the capital of France."}]


def test_a_rendered_conversation_is_completed_like_a_chat(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        rendered = client.post("/apply-template", json={"messages": QUESTION}).json()["prompt"]
        asked = {"prompt": rendered, "n_predict": 24, "temperature": 0, "n_probs": 3}
        answer = client.post("/completion", json=asked | {"return_tokens": True}).json()
        chat = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}
        body = client.post("/chat/completions", json=chat).json()
        assert "Paris" in answer["content"]
        assert answer["content"] == body["choices"][0]["message"]["content"]
        assert answer["tokens_evaluated"] == body["usage"]["prompt_tokens"]
        assert [each["id"] for each in answer["completion_probabilities"]] == answer["tokens"]
        text = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["content"]
        assert text.startswith(answer["content"])
        banned = asked | {"logit_bias": [[answer["tokens"][0], False]], "n_predict": 1}
        other = client.post("/completion", json=banned | {"return_tokens": True}).json()
        assert other["tokens"] != answer["tokens"][:1]
        slots = client.get("/slots").json()
        assert len(slots) == client.get("/props").json()["total_slots"]
        assert "llamacpp:tokens_predicted_total" in client.get("/metrics").text
