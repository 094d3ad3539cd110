"""Published chat templates without their lists of tools, and tokenizers of the same kinds; transcribed by hand."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

QWEN3 = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n') %}
                {%- set reasoning_content = reasoning_content.split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n'
                    + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- set given = call.function.arguments %}
            {{- (given if given is string else given | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

R1 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, system_prompt='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
    "{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

STRICT = (  # Mistral-Nemo: roles alternate, calls with their identities instead of words
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
    "{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}{%- set ns = namespace(n=0) %}"
    "{%- for m in rest %}"
    "{%- if m.role in ['user', 'assistant'] and (m.role == 'user' or m.tool_calls is undefined) %}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('roles must alternate') }}"
    "{%- endif %}"
    "{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}{{- '<s>' }}"
    "{%- for m in rest %}{%- if m.role == 'user' %}"
    "{%- if tools is not none and loop.last %}"
    "{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST]' }}{%- if loop.first and system is defined %}{{- system + '\n\n' }}{%- endif %}"
    "{{- m.content + '[/INST]' }}"
    "{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{- '[TOOL_CALLS][' }}"
    "{%- for call in m.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}"
    """{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}"""
    """{{- ']</s>' }}"""
    "{%- elif m.role == 'assistant' %}{{- m.content + '</s>' }}"
    """{%- elif m.role == 'tool' %}"""
    """{{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}' }}"""
    "{%- else %}{{- raise_exception('Only user, assistant and tool roles') }}{%- endif %}{%- endfor %}"
)
PARTS = (  # Kimi, Qwen3-VL: parts, each with its kind; words that stand alone are treated otherwise
    "{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for m in messages %}{{- '<|im_' + m.role + '|>' }}"
    "{%- if m['content'] is string %}{{- m['content'].split('</think>')[-1] }}{%- else %}"
    "{%- for part in m['content'] %}{{- '<' + part['type'] + '>' + part['text'] }}{%- endfor %}{%- endif %}"
    "{%- if m.tool_calls %}{%- for call in m['tool_calls'] %}{{- '<|call|>' + (call | tojson) }}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_assistant|>' }}{%- endif %}"
)
BOS = {"r1": "<｜begin▁of▁sentence｜>", "llama2": "<s>"}
EOS = {"r1": "<｜end▁of▁sentence｜>", "llama2": "</s>"}
PUBLISHED = {"qwen3": QWEN3, "r1": R1, "llama2": LLAMA2}
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<｜User｜>", "<｜Assistant｜>"),
    *(*BOS.values(), *EOS.values()),
]
WORDS = "how many foxes jump nine of them do system user assistant model they are red why because the answer is 42 "


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer of the kind that a family has, with its chat template."""
    falls_back = family == "llama2"
    pieces = Tokenizer(models.BPE(byte_fallback=falls_back))
    special = list(SPECIAL)
    if family == "llama2":  # a word begins with its blank, and digits stand alone
        pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        pieces.post_processor = processors.ByteLevel(trim_offsets=family != "qwen3")
        pieces.decoder = decoders.ByteLevel()
    special += [f"<0x{byte:02X}>" for byte in range(256) if falls_back]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*dict.fromkeys(special)], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    pieces.train_from_iterator(f" {WORDS}".replace(" ", "\0 ").split("\0") * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token=BOS.get(family), eos_token=EOS.get(family, "<|im_end|>")
    )
    tokenizer.chat_template = PUBLISHED[family]
    return tokenizer
