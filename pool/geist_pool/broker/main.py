"""The broker's process: `python -m geist_pool.broker.main JSON`; the JSON is a BrokerConfig.

It ends at SIGTERM, or when the process that holds the other end of `parent_fd` is gone: then every request gets its last reply,
and shared memory is emptied.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import random
import signal
import sys
from pathlib import Path
from typing import Final

from geist_pool import config as settings
from geist_pool import observe
from geist_pool.broker.loop import Loop
from geist_pool.broker.machine import Machine, MachineConfig
from geist_pool.broker.ports import Store
from geist_pool.broker.text_jobs import TextJobs
from geist_pool.config import BrokerConfig
from geist_pool.engine import Engine, Gguf
from geist_pool.errors import GeistPoolError
from geist_pool.text.tokenizer import Tokenizer
from geist_pool.text.vocabulary import Vocabulary

COLLECT: Final = (10_000, 20, 20)  # thresholds of the garbage collector


def read_vocabulary(path: Path) -> Vocabulary:
    """From a model file's metadata; no weights are loaded."""
    with Engine("scalar", 1) as engine, Gguf(engine, path) as gguf:
        return Vocabulary.from_metadata(gguf.get)


def spare_collector() -> None:
    """What is here now (modules, the vocabulary) stays, so the garbage collector need not look at it again; and since the books
    hold few cycles, it looks at the rest less often than it would by default. `main` has switched it off."""
    gc.freeze()
    gc.set_threshold(*COLLECT)
    gc.enable()


def _version() -> str:
    try:
        return importlib.metadata.version("geist-pool")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine_config(config: BrokerConfig, tokenizer: Tokenizer) -> MachineConfig:
    return MachineConfig(
        pool=config.pool,
        store=config.store,
        version=_version(),
        model=Path(config.model_path).name,
        n_vocab=len(tokenizer.vocabulary.tokens),
        eog=tuple(sorted(tokenizer.eog)),
        has_template=tokenizer.vocabulary.chat_template is not None,
        memory=config.memory,
        queue=config.queue,
        slots=config.slots,
        kv_type=config.kv_type,
        heartbeat_s=config.heartbeat_s,
        worker_timeout_s=config.worker_timeout_s,
        max_attempts=config.max_attempts,
        keep_contexts=config.keep_contexts,
        saved_dir=config.saved_dir,
        spaces=config.spaces,
        token_bytes=tokenizer.vocabulary.longest_piece(),
    )


def run_broker(config: BrokerConfig) -> int:
    """The whole life of a broker process; its exit status."""
    log = observe.logger("broker")
    try:
        tokenizer = Tokenizer(read_vocabulary(Path(config.model_path)))
        machine = Machine(machine_config(config, tokenizer), random.Random(os.urandom(32)))
        spare_collector()
        with (
            TextJobs(tokenizer) as text,
            Loop(
                machine,
                text,
                Store(config.store, config.kv_type, config.bindings),
                address=config.address,
                worker_address=config.worker_address,
                parent_fd=config.parent_fd,
                keep_contexts=config.keep_contexts,
            ) as loop,
        ):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # ending has an order, and that is the supervisor's
            signal.signal(signal.SIGTERM, lambda *_: loop.stop())
            log.info("listening", address=config.address)
            loop.run()
    except GeistPoolError as error:
        log.error("broker ends", code=error.code, error=str(error))
        return 1
    return 0


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m geist_pool.broker.main JSON", file=sys.stderr)
        return 2
    gc.disable()  # until there is something that goes again: hundreds of thousands of tokens would wake it again and again
    config = settings.broker_config(argv[1])
    observe.set_up("broker", log_format=config.log_format, log_level=config.log_level)
    return run_broker(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
