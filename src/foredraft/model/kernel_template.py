"""A kernel's source as torch's compiler takes it up: a template in C++, filled in for the tensors of one call.

Knows torch's compiler's interface for templates. Does not know what any kernel does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def source_beside(module: str) -> str:
    """Return the C++ source, with Jinja's placeholders, that lies beside a Python module and has its name."""
    return Path(module).with_suffix(".cpp.jinja").read_text(encoding="utf-8")


def kernel_call(name: str, source: str, inputs: Mapping[str, Any], layout: Any, **values: Any) -> Any:
    """Return the call of a kernel as torch's compiler represents it.

    Args:
        name: of the kernel.
        source: the template; it finds `inputs` and `values` by their names, `kernel` and `template` as torch's own
            templates do, `output`, and `num_threads`.
        inputs: realised tensors of the compiler, by name.
        layout: of what comes out.
        **values: what else is filled in.
    """
    from torch._inductor.codegen.cpp_template import CppTemplate  # slow to import, and needed by those who compile

    class Kernel(CppTemplate):  # torch's interface: it asks for a subclass
        def render(self, **given: Any) -> str:
            if given.get("epilogue_nodes"):
                raise NotImplementedError(f"the kernel {name} has no place for what is made of its results")
            rendered: str = self._template_from_string(source).render(
                template=self,
                kernel=given["kernel"],
                output=given.get("template_buffer_node") or self.output_node,
                num_threads=self.num_threads,
                **dict(zip(inputs, self.input_nodes, strict=True)),
                **values,
            )
            return rendered

    kernel: Any = Kernel(name, list(inputs.values()), layout, torch.get_num_threads())  # torch leaves it unannotated
    called = kernel.generate().output_node()
    called.data.data.allow_epilogue_fusion = False
    return called
