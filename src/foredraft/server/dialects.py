"""The marks that models write around their thoughts and tool calls, chosen by what their chat templates hold.

Two tables: of calls at most one row fits a template, and of thoughts the first that does counts. The marks are those of
the templates that the models come with, and of vLLM's documentation. Does not read a text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from foredraft.server.calls import BraceCall, JsonCall, NamedCall, PythonCall, Style, TaggedCall


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The marks around a thought, and what is left out around it and the answer.

    Behind a thought, and else at the beginning, `turn` and `answer` precede what the answer says.
    """

    needle: str  # a regular expression that is found in the template
    open: str
    close: str
    dropped: tuple[str, ...] = ()
    turn: str = ""
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Calls:
    """The marks around tool calls; the texts `prefix`, `end` and `between` are what a model has to write."""

    needle: str
    opens: tuple[str, ...]  # each begins a call
    style: Style
    dropped: tuple[str, ...] = ()
    prefix: str = ""  # of the first call, with its mark
    end: str = ""  # of a call
    between: str | None = None  # calls, with the mark of the next; None if there is only one
    suffix: str = ""  # of the last call
    bare: str = ""  # a character that begins a call which no mark precedes, at the beginning of an answer

    @property
    def listed(self) -> bool:
        """Whether more calls may follow a comma or a semicolon."""
        return self.between in (", ", "; ")


Row = TypeVar("Row", Thoughts, Calls)
_BLANK = r"(?:\\n|[^\w<>])*"  # in a template: line breaks, and what ends one expression and begins the next
_QWEN = TaggedCall(">\n", r"\s*<parameter=\s*([^<>]*?)\s*>", "<parameter={0}>\n", "\n</parameter>\n", "</function>")
_GLM = TaggedCall(
    "\n", r"\s*<arg_key>\s*([^<>]*?)\s*</arg_key>\s*<arg_value>", "<arg_key>{0}</arg_key>\n<arg_value>",
    "</arg_value>\n", "</tool_call>",
)  # fmt: skip
_MINIMAX = TaggedCall(
    '">\n', r'\s*<parameter name="([^<>"]*)">', '<parameter name="{0}">', "</parameter>\n", "</invoke>"
)
_DSML = TaggedCall(
    '">\n', r'\s*<｜DSML｜parameter name="([^<>"]*)"[^<>]*>', '<｜DSML｜parameter name="{0}" string="{1}">',
    "</｜DSML｜parameter>\n", "</｜DSML｜invoke>",
)  # fmt: skip
_DEEPSEEK = r"\s*(?:function)?(?:<｜tool▁sep｜>)?(?P<name>[\w.-]+)(?:<｜tool▁sep｜>|\s*```json)\s*(?=\{|\Z)"
_OF_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "\n```")
_FIRST_OF_DEEPSEEK, _NEXT_OF_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>"
_KIMI = r"\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{|\Z)"
_MISTRAL = r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{|\Z)"
_CHANNELS = (
    "<|start|>assistant", "<|channel|>commentary", "<|channel|>final", "<|channel|>analysis", "<|message|>", "<|end|>",
    "<|constrain|>",
)  # fmt: skip
_OF_COHERE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

GPT_OSS = Thoughts(
    r"<\|channel\|>", "<|channel|>analysis<|message|>", "<|end|>", _CHANNELS, "<|start|>assistant",
    "<|channel|>final<|message|>",
)  # fmt: skip
THOUGHTS = (
    GPT_OSS,
    Thoughts(r"<\|channel>", "<|channel>thought", "<channel|>"),
    Thoughts(r"\[THINK\]", "[THINK]", "[/THINK]"),
    Thoughts("<seed:think>", "<seed:think>", "</seed:think>"),
    Thoughts(r"<\|START_THINKING\|>", "<|START_THINKING|>", "<|END_THINKING|>", _OF_COHERE,
             answer="<|START_RESPONSE|>"),
    Thoughts(r"<\|inner_prefix\|>", "<|inner_prefix|>", "<|inner_suffix|>"),
    Thoughts("Here is my thought process:", "Here is my thought process:", "Here is my response:"),
    Thoughts("<mm:think>", "<mm:think>", "</mm:think>"),
    Thoughts("<think></think>.*<response></response>", "<think>", "</think>", ("<response>", "</response>"),
             answer="<response>"),
    Thoughts("<think>.*<answer>", "<think>", "</think>", ("<answer>", "</answer>"), answer="<answer>"),
    Thoughts("<thought>", "<thought>", "</thought>"),
    Thoughts("</?think>", "<think>", "</think>"),
)  # fmt: skip

CALLS = (
    Calls(r"<\|channel\|>", (" to=functions.",),
          NamedCall(r"(?P<name>[\w.-]+)[^{]*?<\|message\|>\s*(?=\{|\Z)", "{} <|constrain|>json<|message|>"),
          (*_CHANNELS, "<|call|>"), "<|channel|>commentary to=functions."),
    Calls(r"<\|tool_call>", ("<|tool_call>",), BraceCall('<|"|>'), ("<tool_call|>",), "<|tool_call>", "<tool_call|>",
          "<|tool_call>"),
    Calls("<start_function_call>", ("<start_function_call>",), BraceCall("<escape>"), ("<end_function_call>",),
          "<start_function_call>", "<end_function_call>", "<start_function_call>"),
    Calls("｜DSML｜.*function_calls>", ('<｜DSML｜invoke name="',), _DSML,
          ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
          '<｜DSML｜function_calls>\n<｜DSML｜invoke name="', "", '\n<｜DSML｜invoke name="',
          "\n</｜DSML｜function_calls>"),
    Calls(r"\A(?!.*function_calls>).*｜DSML｜", ('<｜DSML｜invoke name="',), _DSML,
          ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
          '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="', "", '\n<｜DSML｜invoke name="', "\n</｜DSML｜tool_calls>"),
    Calls("<minimax:tool_call>", ('<invoke name="',), _MINIMAX, ("<minimax:tool_call>", "</minimax:tool_call>"),
          '<minimax:tool_call>\n<invoke name="', "", '\n<invoke name="', "\n</minimax:tool_call>"),
    Calls("<｜tool▁calls▁begin｜>.*```json", ("<｜tool▁call▁begin｜>",),
          NamedCall(_DEEPSEEK, "function<｜tool▁sep｜>{}\n```json\n"), _OF_DEEPSEEK, _FIRST_OF_DEEPSEEK,
          "\n```<｜tool▁call▁end｜>", _NEXT_OF_DEEPSEEK, "<｜tool▁calls▁end｜>"),
    Calls(r"\A(?!.*```json).*<｜tool▁calls▁begin｜>", ("<｜tool▁call▁begin｜>",),
          NamedCall(_DEEPSEEK, "{}<｜tool▁sep｜>"), _OF_DEEPSEEK, _FIRST_OF_DEEPSEEK,
          "<｜tool▁call▁end｜>", _NEXT_OF_DEEPSEEK, "<｜tool▁calls▁end｜>"),
    Calls(r"<\|tool_calls_section_begin\|>", ("<|tool_call_begin|>",),
          NamedCall(_KIMI, "functions.{}:0<|tool_call_argument_begin|>"),
          ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>"),
          "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_begin|>",
          "<|tool_calls_section_end|>"),
    Calls("<seed:tool_call>", ("<function=",), _QWEN, ("<seed:tool_call>", "</seed:tool_call>"),
          "<seed:tool_call>\n<function=", "\n</seed:tool_call>", "\n<seed:tool_call>\n<function="),
    Calls(rf"<tool_call>{_BLANK}<function=", ("<function=",), _QWEN, ("<tool_call>", "</tool_call>"),
          "<tool_call>\n<function=", "\n</tool_call>", "\n<tool_call>\n<function="),
    Calls(r"\A(?!.*<parameter=).*<function=", ("<function=",),
          NamedCall(r"(?P<name>[^<>\s]+)>\s*(?=\{|\Z)", "{}>"), ("</function>",), "<function=", "</function>",
          "<function="),
    Calls("<arg_key>", ("<tool_call>",), _GLM, (), "<tool_call>", "", "\n<tool_call>"),
    Calls(r"\[TOOL_CALLS\].*\[ARGS\]", ("[TOOL_CALLS]",), NamedCall(_MISTRAL, "{}[ARGS]"), (), "[TOOL_CALLS]", "",
          "[TOOL_CALLS]"),
    Calls(r"\A(?!.*\[ARGS\]).*\[TOOL_CALLS\]", ("[TOOL_CALLS]",), JsonCall(listed=True), (), "[TOOL_CALLS][", "",
          ", ", "]"),
    Calls(r"<\|START_ACTION\|>", ("<|START_ACTION|>",), JsonCall("tool_name", "parameters", listed=True),
          ("<|END_ACTION|>",), "<|START_ACTION|>[", "", ", ", "]<|END_ACTION|>"),
    Calls(r"<\|tool_(?:call_start|list_start)\|>", ("<|tool_call_start|>",), PythonCall(), ("<|tool_call_end|>",),
          "<|tool_call_start|>[", "", ", ", "]<|tool_call_end|>"),
    Calls("<TOOLCALL>", ("<TOOLCALL>",), JsonCall(listed=True), ("</TOOLCALL>",), "<TOOLCALL>[", "", ", ",
          "]</TOOLCALL>"),
    Calls(r"<\|tool_call\|>", ("<|tool_call|>",), JsonCall(listed=True), ("<|/tool_call|>",), "<|tool_call|>[", "",
          ", ", "]"),
    Calls(rf'<tool_call>{_BLANK}{{\\?"name', ("<tool_call>",), JsonCall(), ("</tool_call>",), "<tool_call>\n",
          "\n</tool_call>", "\n<tool_call>\n"),
    Calls(r"func_name1\(|\[\w+\(\w+=", (), PythonCall(bare=True), (), "[", "", ", ", "]", "["),
    Calls(r'(?:<\|python_tag\|>|ipython).*"parameters"', ("<|python_tag|>",),
          JsonCall("name", "parameters", listed=True, bare=True), (), "", "", "; ", "", "{"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a model's texts are marked by; None is nothing."""

    thoughts: Thoughts | None
    calls: Calls | None

    def marks(self, *, called: bool) -> list[str]:
        """Return all marks, those of calls if they are `called`."""
        thoughts = [self.thoughts.open, self.thoughts.close, *self.thoughts.dropped] if self.thoughts else []
        return thoughts + ([*self.calls.opens, *self.calls.dropped] if self.calls and called else [])


@lru_cache(16)
def dialect_of(template: str) -> Dialect:
    """Return the dialect of the model that a chat template belongs to."""
    return Dialect(_fitting(THOUGHTS, template), _fitting(CALLS, template) if "tools" in template else None)


def _fitting(rows: Sequence[Row], template: str) -> Row | None:
    return next((row for row in rows if re.search(row.needle, template, re.DOTALL)), None)
