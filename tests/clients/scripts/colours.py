"""instructor: an object in each of its modes. Arguments: URL of the server, model."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

QUESTION = "Name a dark green."


class Colour(BaseModel):
    name: Literal["red", "green"]
    dark: bool


url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    chat = instructor.from_openai(client, mode=mode).chat.completions
    messages = [{"role": "user", "content": QUESTION}]
    made = chat.create(model=model, messages=messages, response_model=Colour, max_retries=1)
    print(mode.name, made.model_dump_json())
responses = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS).responses
made = responses.create(model=model, input=QUESTION, response_model=Colour, max_retries=1)
print("RESPONSES_TOOLS", made.model_dump_json())
