"""Become a real engine on this CPU: serve.py ENGINE --tokenizer FOLDER --work FOLDER --port N --events N --replay N [...]

Run by the engine's own Python. Makes the tiny model if it, as its recipe is now, is not there, prints nothing, and turns into the engine, so that
whoever started this process has the engine as its child. Arguments after -- go to the engine.
"""
import argparse
import json
import os
import pathlib
import sys

import encoder_models
import tiny_model

own = pathlib.Path(__file__).resolve().parent
parser = argparse.ArgumentParser()
parser.add_argument("engine", choices=["vllm", "render", "sglang", "sglang_ids"], help="render, sglang_ids: only token ids")
parser.add_argument("--tokenizer", required=True)
parser.add_argument("--work", required=True, help="where models are kept")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--events", type=int, help="KV events of rank N come at port EVENTS + N")
parser.add_argument("--replay", type=int)
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--blocks", type=int, default=64, help="blocks, or pages, of a rank")
parser.add_argument("--model", default="qwen3", help="kind of tiny model; dummy, encoded: a model of encoder_models.py without and with weights (vLLM)")
parser.add_argument("--template", help="file of a chat template instead of the tokenizer's")
parser.add_argument("--adapters", nargs="*", default=[], help="names of LoRA adapters (vLLM)")
parser.add_argument("--context", type=int, default=1024)
parser.add_argument("--no-tools", action="store_true", help="no tool-call parser (vLLM)")
parser.add_argument("--tools", default="hermes", help="tool-call parser (vLLM)")
parser.add_argument("--connector", help="JSON of vLLM's --kv-transfer-config")
parser.add_argument("--side", type=int, default=5600, help="port at which NIXL's agents of rank 0 meet")
split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
options, further = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1:]

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", DO_NOT_TRACK="1", OMP_NUM_THREADS="1")
mixed = options.model in ("qwen3", "encoded")
name = pathlib.Path(options.tokenizer).name + "-" + options.model
if options.template:
    name += "-" + pathlib.Path(options.template).stem
if options.adapters:
    name += "-" + "-".join(options.adapters)
model = pathlib.Path(options.work).resolve() / name
if options.model in ("dummy", "encoded"):
    def folder():
        words = encoder_models.main(options.tokenizer, model)
        if mixed:
            tiny_model.fill(model, words)

    tiny_model.once(model, tiny_model.recipe(options.tokenizer, options.model), folder)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(model)
    further += ["--load-format", "safetensors" if mixed else "dummy"]
else:
    tiny_model.make(options.tokenizer, model, options.model, options.template, options.adapters)

common = [str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(options.port)]
events = {"publisher": "zmq", "endpoint": f"tcp://*:{options.events}", "replay_endpoint": f"tcp://127.0.0.1:{options.replay}",
          "topic": "kv-events"}
tools = [] if options.no_tools else ["--enable-auto-tool-choice", "--tool-call-parser", options.tools]
if options.engine.startswith("sglang"):
    cores = os.cpu_count() or 1
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", PYTHONPATH=str(own / "sglang-kernels"),
                      SGLANG_CPU_OMP_THREADS_BIND="|".join(str(r % cores) for r in range(options.ranks)))
    server = ["-m", "sglang.launch_server"]
    if options.engine == "sglang_ids":
        server = [str(own / "sglang_ids.py"), "--skip-server-warmup"]
    command = [sys.executable, *server, "--model-path", *common, "--device", "cpu", "--page-size", "16",
               "--max-total-tokens", str(16 * options.blocks), "--max-running-requests", "8", "--context-length", str(options.context),
               "--disable-overlap-schedule", "--enable-metrics", "--enable-cache-report", "--dp-size", str(options.ranks),
               "--kv-events-config", json.dumps(events), *(["--dtype", "bfloat16"] if mixed else [])]
else:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_SERVER_DEV_MODE="1",
                      VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1")
    command = [sys.executable, str(pathlib.Path(sys.executable).with_name("vllm"))]  # its first line names the folder of the installation
    common += ["--max-model-len", str(options.context), "--trust-request-chat-template", *tools, *(["--dtype", "float32"] if mixed else [])]
    if options.engine == "render":
        command += ["launch", "render", *common]
    else:
        command += ["serve", *common, "--enforce-eager", "--max-num-seqs", "8", "--enable-prefix-caching", "--block-size", "32",
                    "--num-gpu-blocks-override", str(options.blocks), "--enable-prompt-tokens-details", "--api-server-count", "1",
                    "--kv-events-config", json.dumps({"enable_kv_cache_events": True, **events})]
        if options.ranks > 1:
            command += ["--data-parallel-size", str(options.ranks), "--enable-scale-out"]
        if options.adapters:
            command += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules",
                        *(f"{a}={model / ('adapter-' + a)}" for a in options.adapters)]
        if options.connector:
            os.environ.update(UCX_TLS="tcp,self,sm", UCX_NET_DEVICES="lo", VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
                              VLLM_NIXL_SIDE_CHANNEL_PORT=str(options.side))
            command += ["--kv-transfer-config", options.connector]
os.execv(command[0], command + further)
