"""Call a server with the clients that Python has, in every way that they call one; a line of JSON for each.

`python calls.py ADDRESS MODEL`, in an environment with requirements.txt. The third field is empty if the call held:
that it did not fail, and that what was asked for is there. Clients that are not installed are left out.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

BASE, NAME = sys.argv[1:3]
URL, ASK = f"{BASE}/v1", "What is the weather?"
SAID: list[Any] = [{"role": "user", "content": ASK}]
SHORT = {"model": NAME, "max_tokens": 12}


class Weather(BaseModel, extra="forbid"):
    """Tells the weather of a city."""

    city: Literal["Paris", "Rome"]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    return f"Rain in {city}"


def with_openai() -> dict[str, Callable[[], Any]]:
    """Return calls of the client of OpenAI."""
    import openai

    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    tool = openai.pydantic_function_tool(Weather)
    flat = {"type": "function"} | tool["function"]

    def parsed() -> Any:
        asked = {"model": NAME, "messages": SAID, "max_tokens": 120}
        answer = client.chat.completions.parse(tools=[tool], tool_choice="required", parallel_tool_calls=False, **asked)
        [call] = answer.choices[0].message.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain"}
        client.chat.completions.create(messages=[*SAID, answer.choices[0].message, result], tools=[tool], **SHORT)
        return call.function.parsed_arguments.city

    def streamed() -> Any:
        asked = {"model": NAME, "messages": SAID, "max_tokens": 120, "stream_options": {"include_usage": True}}
        asked |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        with client.chat.completions.stream(**asked) as stream:
            list(stream)
            final = stream.get_final_completion()
        return final.usage and final.choices[0].message.tool_calls[0].function.parsed_arguments.city

    def responded() -> Any:
        asked = {"model": NAME, "input": SAID, "tools": [flat], "tool_choice": "required", "max_output_tokens": 120}
        asked |= {"parallel_tool_calls": False}
        answer = client.responses.create(**asked)
        call = next(item for item in answer.output if item.type == "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
        client.responses.create(model=NAME, input=[*SAID, *answer.output, result], max_output_tokens=16)
        with client.responses.stream(**asked) as stream:
            list(stream)
            return stream.get_final_response().output

    return {
        "chat": lambda: client.chat.completions.create(messages=SAID, reasoning_effort="low", **SHORT).usage,
        "chat stream": lambda: len(list(client.chat.completions.create(messages=SAID, stream=True, **SHORT))) > 2,
        "chat tools, parsed": parsed,
        "chat tools, streamed": streamed,
        "chat schema": lambda: client.chat.completions.parse(
            model=NAME, messages=SAID, max_tokens=120, response_format=Weather
        ).choices[0].message.parsed,
        "completions": lambda: client.completions.create(prompt=ASK, **SHORT).choices[0].text,
        "responses tools": responded,
        "responses schema": lambda: client.responses.parse(
            model=NAME, input=ASK, text_format=Weather, max_output_tokens=120
        ).output_parsed,
    }  # fmt: skip


def with_anthropic() -> dict[str, Callable[[], Any]]:
    """Return calls of the client of Anthropic."""
    import anthropic

    client = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0)
    tool = {"name": "weather", "description": "d", "input_schema": Weather.model_json_schema()}
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 120, "messages": SAID, "tools": [tool]}
    surely = {"type": "any", "disable_parallel_tool_use": True}

    def turn() -> Any:
        answer = client.messages.create(tool_choice=surely, **asked)
        call = answer.content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
        said = [*SAID, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        client.messages.create(model=NAME, max_tokens=12, messages=said, tools=[tool])
        return call.input["city"]

    def streamed() -> Any:
        with client.messages.stream(tool_choice={"type": "tool", "name": "weather"}, **asked) as stream:
            return stream.get_final_message().content[-1].input["city"]

    return {
        "messages": lambda: client.messages.create(model=NAME, max_tokens=12, messages=SAID).usage.output_tokens,
        "thinking": lambda: client.messages.create(thinking={"type": "adaptive"}, **asked | {"max_tokens": 12}).content,
        "tools": turn,
        "tools, streamed": streamed,
        "count_tokens": lambda: client.messages.count_tokens(model=NAME, messages=SAID, tools=[tool]).input_tokens,
    }  # fmt: skip


def with_agents() -> dict[str, Callable[[], Any]]:
    """Return runs of OpenAI's Agents SDK with a tool."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    def run(kind: Any, *, stream: bool) -> Any:
        async def whole() -> Any:
            model = kind(NAME, AsyncOpenAI(base_url=URL, api_key="none", max_retries=0))
            settings = agents.ModelSettings(tool_choice="required", max_tokens=120, parallel_tool_calls=False)
            # the tiny model may write for ever, which the SDK takes for a failure, so the tool's result ends the run
            more: dict[str, Any] = {"model_settings": settings, "tool_use_behavior": "stop_on_first_tool"}
            agent = agents.Agent("a", tools=[agents.function_tool(weather)], model=model, **more)
            if not stream:
                return (await agents.Runner.run(agent, ASK)).new_items
            result = agents.Runner.run_streamed(agent, ASK)
            return [event async for event in result.stream_events()]

        return asyncio.run(whole())

    kinds = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}
    return {f"{name}{', streamed' if stream else ''}": lambda kind=kind, stream=stream: run(kind, stream=stream)
            for name, kind in kinds.items() for stream in (False, True)}  # fmt: skip


def with_litellm() -> dict[str, Callable[[], Any]]:
    """Return calls of LiteLLM by both protocols."""
    import litellm

    tool = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}

    def called(prefix: str, base: str, **more: Any) -> Any:
        asked = {"messages": SAID, "tools": [tool], "max_tokens": 120, "tool_choice": "required"}
        asked |= {"parallel_tool_calls": False}
        answer = litellm.completion(model=f"{prefix}/{NAME}", api_base=base, api_key="none", **asked, **more)
        if more:
            answer = litellm.stream_chunk_builder(list(answer))
        return json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"]

    return {
        "openai": lambda: called("openai", URL),
        "openai, streamed": lambda: called("openai", URL, stream=True),
        "anthropic": lambda: called("anthropic", BASE),
        "anthropic, streamed": lambda: called("anthropic", BASE, stream=True),
    }


def with_langchain() -> dict[str, Callable[[], Any]]:
    """Return calls of LangChain's class for OpenAI."""
    from langchain_openai import ChatOpenAI

    chat, responses = (
        ChatOpenAI(model=NAME, base_url=URL, api_key="none", max_retries=0, max_tokens=120, use_responses_api=each)
        for each in (False, True)
    )

    def called(model: Any) -> Any:
        answer = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(ASK)
        return answer.tool_calls or answer.invalid_tool_calls  # as the schema allows further arguments without an end

    found: dict[str, Callable[[], Any]] = {}
    for name, model in (("chat", chat), ("responses", responses)):
        found |= {
            f"{name}": lambda model=model: model.invoke(ASK, max_tokens=12).usage_metadata,
            f"{name} stream": lambda model=model: list(model.stream(ASK, max_tokens=12)),
            f"{name} tools": lambda model=model: called(model),
        }
        for method in ("function_calling", "json_schema"):
            structured = model.with_structured_output(Weather, method=method)
            found[f"{name} {method}"] = lambda structured=structured: structured.invoke(ASK)
    return found


def with_pydantic_ai() -> dict[str, Callable[[], Any]]:
    """Return runs of Pydantic AI by three protocols."""
    import pydantic_ai
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=URL, api_key="none")
    models = {
        "chat": OpenAIChatModel(NAME, provider=openai), "responses": OpenAIResponsesModel(NAME, provider=openai),
        "anthropic": AnthropicModel(NAME, provider=AnthropicProvider(base_url=BASE, api_key="none")),
    }  # fmt: skip

    limits = pydantic_ai.ModelSettings(max_tokens=120, parallel_tool_calls=False)

    def run(model: Any, output: Any) -> Any:
        agent = pydantic_ai.Agent(model, output_type=output, retries=0, model_settings=limits)
        return agent.run_sync(ASK).output

    found: dict[str, Callable[[], Any]] = {}
    native = pydantic_ai.NativeOutput(Weather)
    for name, model in models.items():
        found |= {
            f"{name} tool": lambda model=model: run(model, Weather),
            f"{name} text": lambda model=model: run(model, str),
        }
        if name != "anthropic":  # of which it does not know that it takes a schema
            found[f"{name} schema"] = lambda model=model: run(model, native)
    return found


def with_llama_index() -> dict[str, Callable[[], Any]]:
    """Return calls of LlamaIndex."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    kind = {"is_chat_model": True, "is_function_calling_model": True}
    model = OpenAILike(NAME, api_base=URL, api_key="none", max_tokens=120, max_retries=0, **kind)
    tool = FunctionTool.from_defaults(weather)
    return {
        "complete": lambda: model.complete(ASK, max_tokens=12),
        "chat": lambda: model.chat([ChatMessage(role="user", content=ASK)], max_tokens=12).message,
        "stream": lambda: list(model.stream_chat([ChatMessage(role="user", content=ASK)], max_tokens=12)),
        "tools": lambda: model.get_tool_calls_from_response(
            model.chat_with_tools([tool], ASK, tool_required=True, allow_parallel_tool_calls=False)
        )[0].tool_kwargs["city"],
    }  # fmt: skip


def with_agent() -> dict[str, Callable[[], Any]]:
    """Return a task for mini-swe-agent, a coding agent whose tool is a shell."""
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    import httpx
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    def turn() -> Any:
        [quote] = httpx.post(f"{BASE}/tokenize", json={"prompt": '"', "model": NAME}).json()["tokens"]
        asked = {"api_base": URL, "api_key": "none", "max_tokens": 120, "tool_choice": "required"}
        asked |= {"parallel_tool_calls": False, "logit_bias": {str(quote): 8}}  # so that the command soon ends
        model = LitellmModel(model_name=f"openai/{NAME}", model_kwargs=asked, cost_tracking="ignore_errors")
        texts = {"system_template": "You have a shell.", "instance_template": "{{task}}"}
        with tempfile.TemporaryDirectory() as folder:
            shell = LocalEnvironment(cwd=folder, env={"PATH": folder})  # in which there are no commands
            agent = DefaultAgent(model, shell, **texts, step_limit=3)
            ended = agent.run("List the files.")
        results = [each for each in agent.messages if each["role"] == "tool"]
        return ended["exit_status"] == "LimitsExceeded" and len(results) == agent.n_calls == 3

    return {"task": turn}


CLIENTS = {
    "openai": with_openai, "anthropic": with_anthropic, "openai-agents": with_agents, "litellm": with_litellm,
    "langchain-openai": with_langchain, "pydantic-ai": with_pydantic_ai, "llama-index": with_llama_index,
    "mini-swe-agent": with_agent,
}  # fmt: skip

for client, make in CLIENTS.items():
    try:
        calls = make()
    except ImportError:
        continue
    for kind, call in calls.items():
        try:
            problem = "" if call() else "nothing came"
        except Exception as error:  # noqa: BLE001  # every failure of a client is a row of the table
            problem = f"{type(error).__name__}: {error}"[:120]
        print(json.dumps([client, kind, problem]), flush=True)
