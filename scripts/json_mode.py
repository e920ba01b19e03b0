"""Ask a server for JSON objects, and print how many ended, were valid, and the share of white tokens.

`python scripts/json_mode.py ADDRESS MODEL`. 200 prompts, or fewer, are asked at temperature 0 and 1, with 512 tokens at
most. The exit status is 1 if an object that ended is no JSON.
"""

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from typing import Any

import httpx

KINDS = (
    "a person",
    "a city",
    "a book",
    "a recipe",
    "a plant",
    "an animal",
    "a film",
    "a company",
    "a planet",
    "a song",
)
WISHES = (
    "Describe {}.", "Describe {} as JSON.", "Write a JSON object about {}.", "Invent {}, as JSON with nested objects.",
    "List five facts about {}.", "List the parts of {} as a JSON array within an object.", "What is {}?",
    "Give me the name, the age and three properties of {}.", "Compare {} with another one, as JSON.",
    "Make a table of {} in three rows.", "Translate the name of {} into four languages.", "Rate {} from 1 to 10.",
    "Write a form that asks about {}.", "Fill in: name, size, colour, price of {}.", "Tell me a story about {}.",
    "Extract the names: Ann and Bob saw {}.", "Is {} alive? Answer true or false, and why.", "Draw {} in words.",
    "Give the schema of {}.", "Return an empty object if you do not know {}.",
)  # fmt: skip
QUOTE = re.compile(r"\\.")  # a backslash, and the letter behind it, which does not end a string
MOST_TOKENS, AT_ONCE = 512, 16


async def answered(
    http: httpx.AsyncClient, room: asyncio.Semaphore, body: dict[str, Any]
) -> tuple[str, list[str], str]:
    """Return a text, its tokens, and the finish reason."""
    async with room:
        answer = await http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    tokens = [each["token"] for each in choice["logprobs"]["content"]]
    return choice["message"]["content"], tokens, choice["finish_reason"]


def white(tokens: list[str]) -> Counter[str]:
    """Return how many tokens are white space between what JSON is made of, and how many within a string."""
    found, text = Counter[str](), ""
    for token in tokens:
        if token.isspace():
            found["within" if QUOTE.sub("", text).count('"') % 2 else "between"] += 1
        text += token
    return found


def is_object(text: str) -> bool:
    """Return whether a text is an object in JSON."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


async def run(address: str, model: str, count: int) -> bool:
    """Print a line for each temperature, and return whether all that ended is valid."""
    prompts, room, held = [wish.format(kind) for kind in KINDS for wish in WISHES], asyncio.Semaphore(AT_ONCE), True
    prompts = prompts[:: len(prompts) // count]
    print("temperature  asked  ended  valid of these  white tokens of all  within strings")
    async with httpx.AsyncClient(base_url=address, timeout=3600) as http:
        for temperature in (0, 1):
            options = {"temperature": temperature, "seed": 1, "max_tokens": MOST_TOKENS, "model": model}
            options |= {"response_format": {"type": "json_object"}, "logprobs": True}
            bodies = [{"messages": [{"role": "user", "content": each}]} | options for each in prompts]
            found = await asyncio.gather(*(answered(http, room, body) for body in bodies))
            ended = [text for text, _, finish in found if finish == "stop"]
            valid = sum(map(is_object, ended))
            tokens = [token for _, each, _ in found for token in each]
            counts = sum((white(each) for _, each, _ in found), Counter())
            between, within = (counts[name] / len(tokens) for name in ("between", "within"))
            shown = f"{len(found):6} {len(ended):6} {valid:15} {between:20.1%} {within:15.1%}"
            print(f"{temperature:11} {shown}", flush=True)
            held = held and valid == len(ended)
    return held


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=len(KINDS) * len(WISHES))
    given = parser.parse_args()
    sys.exit(not asyncio.run(run(given.address, given.model, given.prompts)))


if __name__ == "__main__":
    main()
