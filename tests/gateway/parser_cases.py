"""Answers as the families write them, and what is in them, by the formats' definitions."""

from __future__ import annotations

from swarm_gateway.tools.deepseek import DeepSeekParser
from swarm_gateway.tools.harmony import HarmonyParser
from swarm_gateway.tools.hermes import HermesParser
from swarm_gateway.tools.llama import LlamaParser
from swarm_gateway.tools.mistral import MistralParser
from swarm_gateway.tools.plain import MistralPlainParser, PlainParser
from swarm_gateway.tools.qwen_xml import QwenXmlParser
from swarm_gateway.tools.stream import StreamingParser

Expected = list[tuple[str, ...]]
PARIS = ("call", "get_weather", '{"city": "Paris"}')
ROME = ("call", "get_weather", '{"city": "Rome"}')
NESTED = '{"path": "a {b} \\"c\\".py", "lines": [{"n": 1, "t": "}</"}, {"n": -2.5e3, "t": null}], "héé": "日本 😀\\n"}'

HERMES: list[tuple[str, Expected]] = [
    ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]),
    (
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        [("text", "Let me look.\n"), PARIS, ROME],
    ),
    (
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>\nDone.',
        [PARIS, ("text", "Done.")],
    ),
    (f'<tool_call>{{"name": "write_file", "arguments": {NESTED}}}</tool_call>', [("call", "write_file", NESTED)]),
    (
        "<think>\nThe user wants <tool_call> weather.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        [("think", "The user wants <tool_call> weather.\n"), PARIS],
    ),
    ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par', [("call", "get_weather", '{"city": "Par')]),
    ('<tool_call>\n{"name": "get_wea', [("text", '<tool_call>\n{"name": "get_wea')]),
    ("<tool_call>\nget_weather(Paris)\n</tool_call>", [("text", "<tool_call>\nget_weather(Paris)\n</tool_call>")]),
    ("<tool_call>\n{'name': 'search'}\n</tool_call>", [("text", "<tool_call>\n{'name': 'search'}\n</tool_call>")]),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}</tool_call>', [PARIS]),
    ('<tool_call>{"name": "search"}</tool_call>', [("call", "search", "{}")]),
    ('<tool_call>{"name": "search", "arguments": {"q": "a\nb"}}', [("call", "search", '{"q": "a\\nb"}')]),
    ("  2 < 3 and <tool_cal is no tag <think>\n", [("text", "  2 < 3 and <tool_cal is no tag <think>\n")]),
    (
        '<tool_call>{"name": "search", "arguments": {"q": 01}}</tool_call>',
        [("call", "search", '{"q": '), ("text", "01}}</tool_call>")],
    ),
]

QWEN_XML: list[tuple[str, Expected]] = [
    (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        [PARIS],
    ),
    (
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=units>\nNone\n</parameter>\n</function>\n</tool_call>",
        [("text", "I look.\n\n"), ("call", "get_weather", '{"city": "Paris", "days": 3, "units": null}')],
    ),
    ("<tool_call>\n<function=search>\n</function>\n</tool_call>", [("call", "search", "{}")]),
    (
        '<tool_call>\n<function=write_file>\n<parameter=text>\nif a < b:\n\n    print("é😀")\n</parameter>\n'
        "</function>\n</tool_call>",
        [("call", "write_file", '{"text": "if a < b:\\n\\n    print(\\"é😀\\")"}')],
    ),
    (
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call><function=get_weather><parameter=city>Rome</parameter></function></tool_call>",
        [PARIS, ROME],
    ),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=days>\nsoon\n</parameter>\n</function>\n</tool_call>",
        [("call", "get_weather", '{"days": "soon"}')],
    ),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        [("call", "get_weather", '{"city": "Par')],
    ),
    (
        "<function=search>\n<parameter=q>\n</foo></parameter>\n<parameter=r>\n\n</parameter>\n</function>",
        [("call", "search", '{"q": "</foo>", "r": ""}')],
    ),
    ("<tool_call>\n<func>x</func>", [("text", "<tool_call>\n<func>x</func>")]),
]

LLAMA: list[tuple[str, Expected]] = [
    ('{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|eom_id|>', [PARIS]),
    (
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_weather", "parameters": {"city": "Rome"}}',
        [PARIS, ROME],
    ),
    ('\n{"type": "function", "name": "get_weather", "parameters": {"city": "Rome"}}', [ROME]),
    ('{"name": "Alice", "age": 3}', [("text", '{"name": "Alice", "age": 3}')]),
    ('{"name": "search", "age": 3}', [("text", '{"name": "search", "age": 3}')]),
    (f'{{"name": "write_file", "parameters": {NESTED}}}', [("call", "write_file", NESTED)]),
    ("It is {sunny} in Paris; truly.<|eot_id|>", [("text", "It is {sunny} in Paris; truly.")]),
    ('<|python_tag|>search.call(query="x")', [("text", '<|python_tag|>search.call(query="x")')]),
    ('{"name": "search", "parameters": {"q": [1, 2', [("call", "search", '{"q": [1, 2')]),
]

MISTRAL: list[tuple[str, Expected]] = [
    ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]</s>', [PARIS]),
    (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}, '
        '{"name": "get_weather", "arguments": {"city": "Rome"}}]',
        [PARIS, ROME],
    ),
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}</s>', [PARIS, ROME]),
    ('[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', [PARIS]),
    ('Sure.[TOOL_CALLS]get_weather{"city": "Rome"}', [("text", "Sure."), ROME]),
    (f"[TOOL_CALLS]write_file[ARGS]{NESTED}", [("call", "write_file", NESTED)]),
    ("[THINK]Which city?[/THINK]Where are you?", [("think", "Which city?"), ("text", "Where are you?")]),
    ('[TOOL_CALLS][{"name": "search", "arguments": {"q": "tru', [("call", "search", '{"q": "tru')]),
    ("[TOOL_CALLS]no call {", [("text", "[TOOL_CALLS]no call {")]),
    ("An array [1, [2]] and [TOOL_", [("text", "An array [1, [2]] and [TOOL_")]),
]

HARMONY: list[tuple[str, Expected]] = [
    (
        "<|channel|>analysis<|message|>Need weather.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        [("think", "Need weather."), PARIS],
    ),
    (
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Hi {you}!<|return|>",
        [("think", "Easy."), ("text", "Hi {you}!")],
    ),
    (' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>', [ROME]),
    (
        "<|channel|>commentary<|message|>I look it up.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|><|start|>assistant<|channel|>commentary '
        'to=functions.get_weather<|message|>{"city": "Rome"}<|call|>',
        [("text", "I look it up."), PARIS, ROME],
    ),
    ("Plain words.", [("text", "Plain words.")]),
    ("<|channel|>analysis<|message|>I was cut", [("think", "I was cut")]),
    (
        f"<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>{NESTED}<|call|>",
        [("call", "write_file", NESTED)],
    ),
    (
        '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"q": "un',
        [("call", "search", '{"q": "un')],
    ),
    ("<|channel|>analysis to=python<|message|>1+1<|call|>", [("think", "1+1")]),
    ("<|channel|>final<|message|>a<|start|>b", [("text", "a<|start|>b")]),
]

_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK: list[tuple[str, Expected]] = [
    (f"<｜tool▁calls▁begin｜>{_V3.format('{}')}<｜tool▁calls▁end｜>", [("call", "get_weather", "{}")]),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n'
        '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        [PARIS, ROME],
    ),
    (
        "I look.<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("text", "I look."), PARIS, ROME],
    ),
    ("<think>\nHm 1 < 2.\n</think>\n\nYes.", [("think", "Hm 1 < 2.\n"), ("text", "Yes.")]),
    (
        f"<｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{NESTED}<｜tool▁call▁end｜>",
        [("call", "write_file", NESTED)],
    ),
    ('<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"q', [("call", "search", '{"q')]),
    ("<｜tool▁call▁begin｜>what? {", [("text", "<｜tool▁call▁begin｜>what? {")]),
]

PLAIN: list[tuple[str, Expected]] = [
    ("Hello.\n", [("text", "Hello.\n")]),
    (" \n ", [("text", " \n ")]),
    ("<think>\n\n</think>\n\nHello.", [("text", "Hello.")]),
    ("<think>a</think>b</think>", [("think", "a"), ("text", "b</think>")]),
    ("<thin", [("text", "<thin")]),
    ("<tool_call>{}</tool_call>", [("text", "<tool_call>{}</tool_call>")]),
]

FAMILIES: list[tuple[type[StreamingParser], list[tuple[str, Expected]]]] = [
    (HermesParser, HERMES),
    (QwenXmlParser, QWEN_XML),
    (LlamaParser, LLAMA),
    (MistralParser, MISTRAL),
    (HarmonyParser, HARMONY),
    (DeepSeekParser, DEEPSEEK),
    (PlainParser, PLAIN),
    (MistralPlainParser, [("[THINK]a[/THINK] b</s>", [("think", "a"), ("text", "b")])]),
]
