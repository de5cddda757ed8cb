"""The commands that the pages tell people to type: which test runs each, or why none does."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["CODE_RUN_BY", "RUN_BY", "RUN_BY_NONE", "commands"]

#: What an indented line starts with if it is a command.
_PROGRAMS = ("curl", "docker", "kubectl", "make", "pip", "python", "tracewire", "uvicorn")
#: The languages of fenced blocks that hold commands.
_SHELL = ("", "bash", "console", "sh")

_BENCHMARKS = "tests/test_benchmarks.py::test_"
_LIBRARY = "tests/unit/tracewire/gateway/test_library_routes.py::"
_CHAT = "tests/examples/test_chat_backend.py::test_the_requests_of_its_page"
_CLI = "tests/unit/tracewire/cli/test_"
_OPERATORS = "tests/e2e/parallel/test_deployment.py::test_what_the_documentation_tells_operators_to_type"

_SERVICE = "tests/test_howto.py::test_the_service_s_commands"
_ONE_MACHINE = "tests/e2e/deployment/test_containers.py::test_one_machine_serves_traces_to_clients_outside"
_HOST = "tests/e2e/deployment/test_containers.py::test_the_units_run_on_a_host_of_systemd"

#: The start of a command, and the test that runs it: with these options, or in small. The longest start counts.
RUN_BY = {
    "make demo": (
        "tests/e2e/serving/test_demo.py::test_the_demo_s_three_consumers_agree_with_each_other_and_with_nnsight"
    ),
    "make faults": "tests/faults/test_harness.py::test_nothing_is_lost_whatever_breaks",
    "python -m benchmarks.autoencoders": _BENCHMARKS + "autoencoders",
    "python -m benchmarks.blobs": _BENCHMARKS + "blobs",
    "python -m benchmarks.blocks": _BENCHMARKS + "blocks",
    "python -m benchmarks.blocking": _BENCHMARKS + "blocking",
    "python -m benchmarks.bursts": _BENCHMARKS + "bursts",
    "python -m benchmarks.bus": _BENCHMARKS + "bus",
    "python -m benchmarks.bus --rate 300 --sweep": _BENCHMARKS + "bus_sweep",
    "python -m benchmarks.fleet": _BENCHMARKS + "fleet",
    "python -m benchmarks.gateway": _BENCHMARKS + "gateway",
    "python -m benchmarks.harvest": _BENCHMARKS + "harvest",
    "python -m benchmarks.kinds": _BENCHMARKS + "kinds",
    "python -m benchmarks.overhead": _BENCHMARKS + "overhead",
    "python -m benchmarks.plans": _BENCHMARKS + "plans",
    "python -m benchmarks.policy": _BENCHMARKS + "policy",
    "python -m benchmarks.scheduling": _BENCHMARKS + "scheduling",
    "python -m benchmarks.sizing": _BENCHMARKS + "sizing",
    "python -m benchmarks.soak": _BENCHMARKS + "soak",
    "python -m benchmarks.speculation": _BENCHMARKS + "speculation",
    "python -m benchmarks.steering": _BENCHMARKS + "steering",
    "python -m tests.support.dashboard_load": "tests/e2e/dashboard/test_load.py::test_the_command_prints_figures",
    "python -m examples.chat_backend": "tests/e2e/serving/test_chat_backend.py::test_the_try_out",
    "uvicorn --factory examples.chat_backend.app:create_app": (
        "tests/examples/test_chat_backend.py::test_the_service_as_uvicorn_starts_it"
    ),
    "curl": _CHAT,
    "curl -X PUT localhost:8080/library/": _LIBRARY + "test_entries_are_put_shown_listed_and_removed",
    "curl localhost:8080/library/": _LIBRARY + "test_entries_are_put_shown_listed_and_removed",
    "curl localhost:8080/v1/completions": _LIBRARY + "test_a_trace_names_a_version",
    "python -m tests.e2e.security.fuzz": "tests/e2e/security/test_fuzz.py::test_the_command_prints_one_last_line",
    "tracewire engine MODEL --sandbox": "tests/e2e/security/test_sandbox.py::test_an_engine_serves_from_the_sandbox",
    "python -m tests.faults.harness.soak": "tests/test_commands.py::test_soak",
    "python examples/products/steered_answer.py": (
        "tests/examples/test_products.py::test_an_answer_of_openai_s_client_is_steered_by_http"
    ),
    "python examples/demo_model/train.py": "tests/test_commands.py::test_a_model_is_trained",
    "python examples/demo_model/direction.py": "tests/test_commands.py::test_the_direction_is_found_again",
    "pip install tracewire": "tests/test_packaging.py::test_base_install_runs_without_the_engine",
    "tracewire redis": _CLI + "redis.py::test_redis_runs_until_it_is_told_to_end",
    "tracewire sweep strengths": _CLI + "sweep.py::test_strengths_are_scored_by_a_function",
    "tracewire sweep patch": _CLI + "sweep.py::test_patches_are_a_table_json_and_a_heat_map",
    "tracewire extract": _CLI + "extract.py::test_a_direction_is_found_and_kept",
    "tracewire library": _CLI + "library.py::test_from_a_file_to_a_trace",
    "tracewire keys": _CLI + "keyring.py::test_a_key_is_made_listed_rotated_and_revoked",
    "tracewire audit": _CLI + "audit.py::test_the_command",
    "tracewire gateway --keys keys.toml --signing-key": "tests/e2e/security/test_gateway.py::"
    "test_a_tenant_s_submissions_and_orders_are_the_tenant_s_at_the_engine",
    "tracewire engine MODEL --keyring": "tests/unit/tracewire_engine/launch/test_code_options.py::"
    "test_unsigned_is_refused_where_a_keyring_is_and_the_bus_may_be_shared",
    "tracewire approve": _CLI + "approve.py::test_what_a_caller_submits_is_what_was_approved",
    "inspect eval task.py": "tests/test_howto.py::test_the_evaluation",
    "uvicorn service:app": _SERVICE,
    'curl -X POST "http://localhost:8000/traces?prompt': _SERVICE,
    "curl -N http://localhost:8000/traces/TRACE_ID": _SERVICE,
    "tracewire chat": _CLI + "chat.py::test_each_line_of_a_pipe_is_a_message",
    "tracewire doctor": _CLI + "doctor.py::test_a_sound_bus",
    "tracewire edits install": _CLI + "edits.py::test_declared_interventions_are_installed",
    "tracewire export": _CLI + "export.py::test_safetensors",
    "tracewire replay": _CLI + "replay.py::test_each_form",
    "tracewire run": "tests/e2e/cli/test_up.py::test_up_demo",
    "tracewire steer": _CLI + "control.py::test_a_trace_is_steered_paused_resumed_and_cancelled",
    "tracewire traces": _CLI + "traces.py::test_traces_are_listed",
    "tracewire top": _CLI + "top.py::test_a_trace_is_opened_and_steered",
    "tracewire up demo": "tests/e2e/cli/test_up.py::test_up_demo",
    "tracewire engine MODEL --code listed": "tests/unit/tracewire_engine/launch/test_code_options.py::"
    "test_listed_needs_the_file_and_reads_it",
    "tracewire engine demo": "tests/e2e/tracing/test_traces.py::*",
    "tracewire engine MODEL": "tests/e2e/tracing/test_traces.py::*",
    "tracewire engine MODEL --distributed-executor-backend ray": "tests/e2e/parallel/test_ray.py::*",
    "tracewire models": _CLI + "engines.py::test_models_lists_what_is_served",
    "tracewire gateway": _CLI + "gateway.py::test_a_process_serves_until_sigterm",
    "tracewire gateway --url redis://localhost --tracing": (
        _CLI + "gateway.py::test_a_request_s_spans_are_one_tree_from_the_gateway_to_the_final"
    ),
    "tracewire engine MODEL --url redis://localhost --tracing": "tests/e2e/serving/test_spans.py::*",
    "tracewire gateway --new-key": _CLI + "gateway.py::test_a_new_key_can_be_used",
    "tracewire record": _CLI + "record.py::test_a_trace_is_recorded_shown_and_run_again",
    "tracewire guard": _CLI + "guard.py::test_decisions_are_printed",
    "python -m benchmarks.starts": _BENCHMARKS + "starts",
    "python -m benchmarks.guards": _BENCHMARKS + "guards",
    "tracewire harvest": "tests/e2e/tracing/test_harvest.py::test_the_commands_and_programs_of_the_page_run",
    "tracewire watch": _CLI + "traces.py::test_watch_prints_a_trace_to_its_end",
    "tracewire engines": _OPERATORS,
    "tracewire ready": _OPERATORS,
    "tracewire drain ENGINE --timeout": _OPERATORS,
    "tracewire drain ENGINE": _CLI + "engines.py::test_the_command_lists_probes_and_drains",
    "deploy/one_machine.sh": _ONE_MACHINE,
    'curl -H "Authorization: Bearer $(cat deploy/secrets/gateway-key)"': _ONE_MACHINE,
    "deploy/debian/images.sh": _ONE_MACHINE,
    "deploy/redis/certificates.sh": (
        "tests/e2e/parallel/test_deployment.py::test_a_certificate_is_made_once_for_the_names_that_the_urls_have"
    ),
    "deploy/systemd/install.sh": _HOST,
    "systemctl enable --now tracewire-redis": _HOST,
    "python -m pytest tests/": "",  # tests, each by itself
}

_GPU = "needs a GPU"
_CONTAINERS = "needs Docker; tests/e2e/deployment/test_containers.py does the same with podman"
_UNITS = "is done by the image of a host in tests/e2e/deployment/test_containers.py"
_CLUSTER = "needs a Kubernetes cluster; tests/e2e/parallel/test_deployment.py checks the manifests"

#: The start of a command that no test runs, and the reason. The longest start counts, of these and of those above.
RUN_BY_NONE = {
    "make test": "is what runs the tests",
    "make setup": "makes the environment that the tests run in",
    "make lint": "runs beside the tests",
    'pip install "tracewire[engine-gpu]"': _GPU,
    'pip install "tracewire[harvest,library,notebook]" matplotlib': "is what tests/examples/test_cookbook.py runs in",
    "pip install 'tracewire[engine-gpu,ray]'": _GPU,
    "python -m benchmarks.overhead $O": _GPU,
    "python -m benchmarks.volume $O": _GPU,
    "python -m tests.gpu_taps": _GPU,
    "python -m tests.gpu_ranks": "needs several GPUs; tests/test_gpu_ranks.py runs it on a CPU",
    "python -m tests.gpu_visits": _GPU,
    "python -m tests.gpu_drafts": _GPU,
    "python -m tests.gpu_later_kinds": _GPU,
    "python -m tests.gpu_second_runner": _GPU,
    "python -m benchmarks.steering --model LLAMA_1B": _GPU,
    "python -m tests.distributed.compare": "needs several GPUs; tests/distributed runs the same scenarios on a CPU",
    "python -m tests.faults.harness --recovery": (
        "measures for minutes, with leases as by default; tests/faults/test_harness.py runs the same faults"
    ),
    "docker": _CONTAINERS,
    "apt-get install -y openssl redis-server": _UNITS,
    "python3 -m venv /opt/tracewire/venv": _UNITS,
    "/opt/tracewire/venv/bin/pip install": _GPU,
    "kubectl": _CLUSTER,
    'echo "--from-literal=': _CLUSTER,
    "cd deploy && kustomize": _CLUSTER,
    'pip install "tracewire[gateway,tracing]"': "tests/test_packaging.py installs the base; the locks hold the extras",
    'pip install "tracewire[cli,embedded,gateway,engine-gpu]"': _GPU,
    'pip install "tracewire[embedded,engine-gpu,gateway,pandas]" openai': _GPU,
    "pip install tracewire fastapi uvicorn": "tests/test_packaging.py installs the base; the locks hold the others",
    'pip install "tracewire[inspect]"': "tests/test_packaging.py installs the base; the locks hold this extra",
    'pip install "tracewire[gateway]"': "tests/test_packaging.py installs the base; the locks hold this extra",
    "kubernetes-validate": "tests/e2e/parallel/test_gateway_deployment.py does the same by its library",
    "check-jsonschema": "tests/e2e/parallel/test_gateway_deployment.py runs it",
    "python examples/two_hosts/run.py": (
        "needs Docker; tests/e2e/parallel/test_ray_hosts.py walks it in network namespaces"
    ),
}


_HOWTO = "tests/test_howto.py::test_"
_ENGINE = "tests/e2e/tracing/test_howto.py::test_"

#: The tests that run the Python code of a page, each block as it stands.
CODE_RUN_BY = {
    "README.md": ("tests/e2e/tracing/test_readme.py::*", _ENGINE + "the_rest_of_the_readme"),
    "docs/conditions.md": ("tests/e2e/tracing/test_later_kinds.py::test_the_code_of_the_pages_runs",),
    "docs/edits.md": ("tests/e2e/edits/test_edits.py::test_the_code_of_the_page_runs",),
    "docs/errors.md": (_ENGINE + "the_code_of_the_page_of_errors",),
    "docs/features.md": ("tests/e2e/tracing/test_later_kinds.py::test_the_code_of_the_pages_runs",),
    "docs/gateway.md": (_ENGINE + "the_code_of_the_gateway_s_page",),
    "docs/guards.md": ("tests/unit/tracewire/guards/test_guard.py::test_the_code_of_the_page_runs",),
    "docs/extract.md": ("tests/unit/tracewire/extract/test_page.py::test_the_code_of_the_page_runs",),
    "docs/library.md": ("tests/unit/tracewire/library/test_page.py::test_the_code_of_the_page_runs",),
    "docs/harvest.md": ("tests/e2e/tracing/test_harvest.py::test_the_commands_and_programs_of_the_page_run",),
    "docs/howto/bfloat16.md": (_HOWTO + "a_page_of_cells", _ENGINE + "bfloat16"),
    "docs/howto/fastapi.md": (_HOWTO + "the_service",),
    "docs/howto/inspect.md": (_HOWTO + "the_evaluation",),
    "docs/howto/notebook.md": (_HOWTO + "a_page_of_cells", _ENGINE + "the_notebook_s_cells"),
    "docs/howto/print.md": (_HOWTO + "a_page_of_cells", _ENGINE + "what_a_block_saves_in_place_of_a_print"),
    "docs/howto/script.md": (_HOWTO + "the_script",),
    "docs/howto/typing.md": (_HOWTO + "a_page_of_cells", _ENGINE + "a_typed_block"),
    "docs/lenses.md": ("tests/e2e/tracing/test_later_kinds.py::test_the_code_of_the_pages_runs",),
    "docs/nnsight.md": (_ENGINE + "the_code_of_nnsight_s_page",),
    "docs/heads.md": ("tests/e2e/tracing/test_heads.py::test_the_code_of_the_page_runs",),
    "docs/patching.md": ("tests/e2e/tracing/test_patching.py::test_the_code_of_the_page_runs",),
    "docs/recorder.md": ("tests/e2e/tracing/test_recorder.py::test_the_code_of_the_page_runs",),
    "docs/researchers.md": (_ENGINE + "the_code_for_those_who_come_from_other_libraries",),
    "docs/tutorial.md": (_HOWTO + "the_tutorial", _ENGINE + "the_tutorial_finds_a_direction_and_steers_along_it"),
}


def commands(text: str) -> Iterator[str]:
    """Each command of a page: lines of its fenced shell blocks, and indented lines that start with a program's name.

    Continued lines are one, comments and variables that are set are left out.
    """
    text = re.sub(r"\\\n\s*", "", text)
    fenced = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for kind, block in fenced.findall(text):
        if kind in _SHELL:
            yield from (command for line in block.splitlines() if (command := _command(line)))
    for line in re.findall(r"^    (\S.*)$", fenced.sub("", text), re.MULTILINE):
        if re.match(rf"({'|'.join(_PROGRAMS)}) [\w./'\"-]", command := _command(line)):
            yield command


def _command(line: str) -> str:
    line = re.sub(r"(\s+&)?(\s+#.*)?$", "", line).strip()
    line = re.sub(r"^export \w+=.*$", "", line)
    # A variable that is set for one command, or takes what a command prints.
    line = re.sub(r"^\w+=\$\((.*)\)$", r"\1", line)
    line = re.sub(r"^[A-Z_]+=(\"[^\"]*\"|'[^']*'|\S*)( |$)", "", line)
    return re.sub(r"\s+", " ", line)
