"""Changes weights in a checkpoint and seals it again, so that a run that goes on from it goes wrong.

Twin: checkpoint.c, whose checksums it computes by itself. Tests import it; it is no test.
"""
import json
import re
import struct

from runs import check

MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                      0x27D4EB2F165667C5)


def rotate(x, n):
    return (x << n | x >> (64 - n)) & MASK


def add_lane(lane, x):
    return rotate((lane + x * P2) & MASK, 31) * P1 & MASK


def xxh64(data):
    """XXH64 with seed 0, from its specification."""
    lanes, at = [(P1 + P2) & MASK, P2, 0, -P1 & MASK], 0
    while len(data) - at >= 32:
        lanes = [add_lane(lane, x) for lane, x in zip(lanes, struct.unpack_from("<4Q", data, at))]
        at += 32
    h = P5
    if at:
        h = sum(rotate(lane, n) for lane, n in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            h = ((h ^ add_lane(0, lane)) * P1 + P4) & MASK
    h = (h + len(data)) & MASK
    while len(data) - at >= 8:
        h = (rotate(h ^ add_lane(0, struct.unpack_from("<Q", data, at)[0]), 27) * P1 + P4) & MASK
        at += 8
    if len(data) - at >= 4:
        h = (rotate(h ^ struct.unpack_from("<I", data, at)[0] * P1 & MASK, 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        h = rotate(h ^ byte * P5 & MASK, 11) * P1 & MASK
    for shift, prime in ((33, P2), (29, P3)):
        h = (h ^ h >> shift) * prime & MASK
    return h ^ h >> 32


def change(checkpoint, values):
    """Sets every element of the tensors whose name `values` answers for; seals the checkpoint again."""
    path = checkpoint / "model.safetensors"
    data, state = bytearray(path.read_bytes()), json.loads((checkpoint / "state.json").read_text())
    entry = state["content"]["files"]["model.safetensors"]
    check(f"{xxh64(data):016x}" == entry["xxh64"] and len(data) == entry["bytes"], "the file's checksum", entry)
    first = 8 + struct.unpack_from("<Q", data)[0]
    changed = 0
    for name, tensor in json.loads(data[8:first]).items():
        new = None if name == "__metadata__" else values(name)
        if new is None:
            continue
        begin, end = (first + x for x in tensor["data_offsets"])
        count = (end - begin) // 4
        struct.pack_into(f"<{count}f", data, begin, *(new[i % len(new)] for i in range(count)))
        changed += 1
    check(changed, "no tensor was changed")
    path.write_bytes(data)
    # state.json's own checksum is of its text as Jansson writes it; the entry is all that changes.
    old_entry, new_sum = entry["xxh64"], f"{xxh64(data):016x}"
    compact = state_text(state["content"])
    check(f"{xxh64(compact.encode()):016x}" == state["xxh64"], "the state's checksum", compact)
    state["xxh64"] = f"{xxh64(compact.replace(old_entry, new_sum).encode()):016x}"
    entry["xxh64"] = new_sum
    (checkpoint / "state.json").write_text(json.dumps(state))


def state_text(value):
    """JSON without spaces, keys sorted, numbers with 17 digits as C prints them; 1e-06 is 1e-6 to Jansson."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{state_text(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, float):
        text = re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", f"{value:.17g}")
        return text if re.search(r"[.e]", text) else text + ".0"
    return json.dumps(value, ensure_ascii=False)


# What makes each anomaly, and the steps that are done when it is seen, if one was done before.
KINDS = {
    "gate_collapse": (lambda name: [60.0, -60.0, -60.0] if name.endswith("gate.fc2.bias") else None, 4),
    "zero_gradient": (lambda name: [0.0] if name in ("embed.weight", "lm_head.weight") else None, 2),
    "nan": (lambda name: [float("nan")] if name == "norm.weight" else None, 1),
}
