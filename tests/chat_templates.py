"""Chat templates in the two styles of tool calls that published models use, cut down to what matters."""

from __future__ import annotations

HERMES_TEMPLATE = """\
{%- if tools %}
    {{- '<system>Tools: ' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- ' Write <tool_call>{"name": ..., "arguments": ...}</tool_call></system>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<' ~ message.role ~ '>' }}
    {%- if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments | tojson ~ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '</' ~ message.role ~ '>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<assistant>' }}
    {%- if enable_thinking is defined %}{{ enable_thinking }}{% endif %}
{%- endif %}
"""
LLAMA_TEMPLATE = """\
{%- if tools %}
    {{- '<system>Environment: ipython\\n{"name": ..., "parameters": ...}: ' }}
    {{- (tools | tojson) ~ '</system>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<ipython>' ~ message.content ~ '</ipython>' }}
    {%- elif message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model takes one tool call at once') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<assistant>{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}</assistant>' }}
    {%- else %}
        {{- '<' ~ message.role ~ '>' ~ message.content ~ '</' ~ message.role ~ '>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""
