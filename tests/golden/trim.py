"""Writes cases/*/decode.* and tables/ from the full golden folder, what tests use.

    python tests/golden/trim.py ../shared/golden

All integers of every trace and variant stay; of the tensors, the prefill of every
trace, three rounds of the first trace, and of each sampled trace the first round and
the recorded one with the most accepted drafts. Of the tables, masks of accepted
prefixes become their lengths, ECEs keep twelve digits, and of the scheduler's the
steps without early stop and what follows from the rest are left out.
"""

import json
import pathlib
import sys

import numpy as np
import safetensors.numpy

ROUND = (
    "start",
    "draft_tokens",
    "confidence_logits",
    "draft_token_count",
    "accepted",
    "next_token",
)
KEPT = (
    "prompt",
    "greedy_tokens",
    "spec_tokens",
    "acceptance_lengths",
    "accepted_draft_lengths",
    "tau",
    "temperature",
    "indices",
    "confidence_threshold",
    "stop_token_ids",
)


def trim_trace(trace):
    kept = {key: trace[key] for key in KEPT if trace.get(key) is not None}
    rounds = [{k: r[k] for k in ROUND if r.get(k) is not None} for r in trace["rounds"]]
    for r in rounds:
        if "confidence_logits" in r:
            r["confidence_logits"] = [round(c, 6) for c in r["confidence_logits"]]
    kept["rounds"] = rounds
    if "variants" in trace:
        kept["variants"] = [trim_trace(variant) for variant in trace["variants"]]
    return kept


def trim_tables(source, target):
    target.mkdir(exist_ok=True)
    sts = json.loads((source / "sts.json").read_text())
    for case in sts["cases"]:
        case["confidence_logits"] = [
            [round(x, 6) for x in row] for row in case["confidence_logits"]
        ]
        case["num_accepted"] = [sum(row) for row in case.pop("prefix_accepted")]
    metrics = json.loads((source / "calibration_metrics.json").read_text())
    arrays = safetensors.numpy.load_file(source / "calibration_metrics.safetensors")
    metrics["arrays"] = {
        "confidence_logits": [
            [float(str(x)) for x in row] for row in arrays["confidence_logits"]
        ],
        "num_accepted": arrays["accept_prefix_mask"].sum(1).tolist(),
        "effective_length": arrays["effective_length"].tolist(),
    }
    for name, values in (
        ("sts", sts),
        ("calibration_metrics", metrics),
        (
            "scheduler",
            trim_scheduler(json.loads((source / "scheduler.json").read_text())),
        ),
    ):
        text = json.dumps(values, separators=(",", ":"))
        (target / f"{name}.json").write_text(text + "\n")


def trim_scheduler(table):
    """Curves as far as they are read; what Algorithm 1 visited as pairs."""
    cases = []
    for case in table["cases"]:
        early = case["early_stop"]
        slots = sum(map(len, case["confidences"]))
        cases.append(
            {
                "name": case["name"],
                "confidences": case["confidences"],
                "sps": case["sps"][: len(case["confidences"]) + slots + 1],
                "lengths": early["lengths"],
                "theta_best": early["theta_best"],
                "visited": [[v["request"], v["position"]] for v in early["visited"]],
                "visited_theta": [v["theta"] for v in early["visited"]],
                "no_early_stop": case["no_early_stop"],
            }
        )
    return {"appendix_a": table["appendix_a"], "cases": cases}


def main(source):
    here = pathlib.Path(__file__).parent
    trim_tables(pathlib.Path(source, "tables"), here / "tables")
    for folder in sorted(pathlib.Path(source, "cases").iterdir()):
        values = json.loads((folder / "decode.json").read_text())
        tensors = safetensors.numpy.load_file(folder / "decode.safetensors")
        kept = {k: v for k, v in tensors.items() if ".prefill" in k or "t0.r" in k}
        for index, trace in enumerate(values["sampled"]):
            recorded = range(min(6, len(trace["rounds"])))
            best = max(recorded, key=lambda j, t=trace: t["rounds"][j]["accepted"])
            for j in {0, best}:
                part = f"s{index}.r{j}."
                kept |= {k: v for k, v in tensors.items() if k.startswith(part)}
            trace["indices"] = sorted({0, best})
            trace["rounds"] = [trace["rounds"][j] for j in trace["indices"]]
        kept = {
            k: v for k, v in kept.items() if not k.startswith("s") or "base" not in k
        }
        trimmed = {
            "traces": [trim_trace(trace) for trace in values["traces"]],
            "sampled": [trim_trace(trace) for trace in values["sampled"]],
        }
        target = here / "cases" / folder.name
        text = json.dumps(trimmed, separators=(",", ":"))
        (target / "decode.json").write_text(text + "\n")
        arrays = {k: np.ascontiguousarray(v) for k, v in sorted(kept.items())}
        (target / "decode.safetensors").write_bytes(safetensors.numpy.save(arrays))


if __name__ == "__main__":
    main(sys.argv[1])
