"""`mmserve plan`: its flags, and a plan as a table and as JSON.

Owns the flags and what is printed. Knows no formula.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmserve import flags
from mmserve.config import ModelConfig, SchedulerConfig

if TYPE_CHECKING:  # they bring PyTorch, which the command line does not wait for
    from mmserve.plan.load import Balance
    from mmserve.plan.roofline import Pools
    from mmserve.plan.simulate import Change, Outcome

TRAFFIC = {  # fields of mmserve.plan.traffic.Traffic
    "requests_per_s": (float, "requests a second, of all replicas (default 1)"),
    "sessions": (flags.count, "conversations open at once, instead of requests a second"),
    "images": (flags.number, "pictures of a conversation, in its first request (default 1 or 0)"),
    "repeat": (flags.share, "share of pictures that other conversations show, too (default 0.5)"),
    "seen": (float, "conversations that show such a picture (default 10)"),
    "prompt_tokens": (flags.count, "text of a turn (default 200)"),
    "output_tokens": (flags.count, "of an answer (default 150)"),
    "turns": (flags.count, "of a conversation (default 4)"),
    "think_s": (flags.seconds, "from an answer to the next turn (default 20)"),
}
MOST_REPLICAS, MOST_SESSIONS = 1_000, 1_000_000
SIMULATED = 100_000  # conversations, unless said otherwise


def add_plan_command(commands: Any) -> None:
    """The command on the parsers of the command line."""
    parser = commands.add_parser("plan", help="pools, speed and routing to expect (docs/plan.md)")
    add = parser.add_argument
    add("--model", default=ModelConfig().model, help="a name, a checkpoint folder or a hub id")
    add("--image-tokens", type=flags.count, help="of a checkpoint whose config leaves it open")
    add("--hardware", default="h200", help="a name such as h100, cpu, or a JSON of mmserve bench")
    add("--copy-rate", type=float, metavar="GB/S", help="read and written by a copy")
    add("--matrix-rate", type=float, metavar="TFLOP/S", help="of dense products")
    add("--memory", type=flags.size, help="of one replica, such as 80G")
    add("--traffic", type=flags.file, metavar="JSON", help="the flags below by name, as one object")
    for name, (kind, words) in TRAFFIC.items():
        add("--" + name.replace("_", "-"), dest=name, type=kind, help=words)
    add("--max-num-seqs", type=flags.count, default=SchedulerConfig().max_num_seqs)
    add("--replicas", type=flags.count, default=1)
    add("--simulate", type=flags.number, default=SIMULATED, metavar="N", help="conversations")
    add("--seed", type=flags.number, default=0)
    add("--json", type=Path, metavar="FILE", help="write the plan there")
    parser.set_defaults(run=_plan)


@dataclasses.dataclass(frozen=True)
class Plan:
    model: str
    hardware: str
    source: str  # of the hardware's rates
    traffic: Any
    replicas: int
    pools: Pools
    balance: Balance
    routing: list[Outcome]
    change: Change | None

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        data["balance"]["busy"] = self.balance.busy
        return json.dumps(data, indent=2)


def _plan(args: argparse.Namespace) -> None:
    plan = make_plan(args)
    if args.json is not None:
        args.json.write_text(plan.to_json() + "\n")
    print(render(plan))


def make_plan(args: argparse.Namespace) -> Plan:
    from mmserve.plan.hardware import find_hardware
    from mmserve.plan.load import balance
    from mmserve.plan.model import find_model
    from mmserve.plan.roofline import Roofline, size_pools
    from mmserve.plan.traffic import read_traffic

    if args.replicas > MOST_REPLICAS or args.simulate > MOST_SESSIONS:
        raise ValueError(f"at most {MOST_REPLICAS:,} replicas and {MOST_SESSIONS:,} conversations")
    hardware = find_hardware(
        args.hardware,
        bytes_per_s=None if args.copy_rate is None else args.copy_rate * 1e9,
        flops_per_s=None if args.matrix_rate is None else args.matrix_rate * 1e12,
        memory=args.memory,
    )
    model = find_model(args.model, args.image_tokens)
    model = model if hardware.on_gpu else model.on_cpu()
    given = {name: getattr(args, name) for name in TRAFFIC if getattr(args, name) is not None}
    if not model.sizes.image_tokens and args.traffic is None:
        given.setdefault("images", 0)
    traffic = read_traffic(args.traffic, given)
    if traffic.images and not model.sizes.image_tokens:
        raise ValueError(f"nothing is known here of images in {model.name}: say --images 0")
    pools = size_pools(model, hardware, traffic)
    routing, moved = _simulated(args, traffic, pools)
    return Plan(
        model=model.name,
        hardware=hardware.name,
        source=hardware.source,
        traffic=traffic,
        replicas=args.replicas,
        pools=pools,
        balance=balance(
            Roofline(model, hardware), traffic, pools, args.replicas, args.max_num_seqs
        ),
        routing=routing,
        change=moved,
    )


def _simulated(
    args: argparse.Namespace, traffic: Any, pools: Pools
) -> tuple[list[Outcome], Change | None]:
    """Nothing where there is one replica, or nobody to come."""
    from mmserve.plan.simulate import Arrivals, change, simulate

    if args.replicas < 2 or not args.simulate:
        return [], None
    arrivals = Arrivals.make(traffic, args.simulate, args.replicas, args.seed)
    live = float(args.replicas) * (pools.text_bytes + pools.vision_bytes)
    return simulate(arrivals, pools.images), change(arrivals, live)


def render(plan: Plan) -> str:
    pools, load = plan.pools, plan.balance
    ms = 1e3
    lines = [
        f"{plan.model} on {plan.replicas} x {plan.hardware} (rates: {plan.source})",
        "",
        "one replica",
        f"  text KV pool      {pools.text_bytes / 1e9:>10,.1f} GB   {pools.text_tokens:,} tokens, "
        f"{pools.sessions:,} whole conversations",
        f"  vision KV pool    {pools.vision_bytes / 1e9:>10,.1f} GB   {pools.images:,} images",
        f"  batch             {load.batch:>10.1f}      of {load.most_batch}",
        f"  requests/s        {load.requests_per_s:>10.2f}      of {load.most_requests_per_s:.2f}, "
        f"{100 * load.busy:.0f} % busy",
        f"  tokens/s          {load.tokens_per_s:>10,.0f}      "
        f"{load.session_tokens_per_s:,.0f} a conversation",
        f"  first token       {load.first_known_s * ms:>10.1f} ms   images known; "
        f"{load.first_last_s * ms:.1f} in the last turn",
        f"                    {load.first_new_s * ms:>10.1f} ms   images new",
        f"                    {load.first_loaded_s * ms:>10.1f} ms   on average, under this load",
    ]
    if load.busy >= 1:
        need = int(plan.replicas * load.busy) + 1
        lines.append(f"  OVERLOADED: {need} replicas would do, answers wait without end")
    return "\n".join([*lines, *_routing_lines(plan)])


def _routing_lines(plan: Plan) -> list[str]:
    if plan.change is None:
        return []
    lines = ["", "routing           images found   of at best   encoded   max/mean   p99/mean"]
    lines += [
        f"  {o.policy:<16}{100 * o.hit_rate:>11.1f} %{100 * o.best_hit_rate:>11.1f} %"
        f"{o.encodes:>9.2f}x{o.skew_max:>11.2f}{o.skew_p99:>11.2f}"
        for o in plan.routing
    ]
    for what, share, moved in (
        ("lost", plan.change.lost_share, plan.change.lost_bytes),
        ("added", plan.change.added_share, plan.change.added_bytes),
    ):
        said = f"{100 * share:.2f} % of keys move, at most {moved / 1e9:,.1f} GB of KV"
        lines.append(f"  a replica {what}: {said}")
    return lines
