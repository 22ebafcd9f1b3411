"""SGLang's server, which answers with a prompt's ids in place of computing it: an error 400 whose message is "ids [...]".

Everything before the scheduler is the engine's own: parsing, templates, tokenization, refusals. Arguments are those of
sglang.launch_server; serve.py starts it.
"""
import json
import runpy

if __name__ == "__main__":
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    async def answer(self, tokenized):
        one = tokenized[0] if isinstance(tokenized, list) else tokenized
        raise ValueError("ids " + json.dumps(list(one.input_ids)))

    TokenizerManager._send_one_request = TokenizerManager._send_batch_request = answer
    runpy.run_module("sglang.launch_server", run_name="__main__")
