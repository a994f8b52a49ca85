"""How the processes of a test's stages make their engines; imported in each of them."""

from __future__ import annotations

from mmserve.config import EngineConfig
from mmserve.engine import build_engine
from mmserve.engine.engine import Engine
from mmserve.engine.staging import Option, Staging
from mmserve.handover.choice import Here
from tests.engine.tiny import tiny_model


def tiny(config: EngineConfig, kind: type[Engine] = Engine) -> Engine:
    send_all_away()
    return kind(config, tiny_model())


def family(config: EngineConfig, kind: type[Engine] = Engine) -> Engine:
    send_all_away()
    return build_engine.build_engine(config, kind)


def send_all_away() -> None:
    """On a machine this small, whether it pays depends on the weather."""

    def pays(self: Staging, here: Here, option: Option) -> bool:
        return True

    def may_pay(self: Staging) -> bool:
        return True

    setattr(Staging, "pays", pays)  # noqa: B010
    setattr(Staging, "may_pay", may_pay)  # noqa: B010
