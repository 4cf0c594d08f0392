"""asv benchmarks of attention: device time on a GPU; validation and the NumPy reference on any machine."""

from bench._suite import PROVIDERS, _names, _OnDevice, _OnHost
from pagebench.reference.merge_states import merge_states
from pagebench.reference.paged_attention import paged_attention


class PagedAttentionOnDevice(_OnDevice):
    params = (PROVIDERS, _names("paged_attention"))


class PagedAttentionOnHost(_OnHost):
    params = (_names("paged_attention"),)

    def time_reference(self, name: str) -> None:
        paged_attention(self.problem)  # type: ignore[arg-type]  # the workload's problem is of this op


class MergeStatesOnDevice(_OnDevice):
    params = (PROVIDERS, _names("merge_states"))


class MergeStatesOnHost(_OnHost):
    params = (_names("merge_states"),)

    def time_reference(self, name: str) -> None:
        merge_states(self.problem)  # type: ignore[arg-type]  # the workload's problem is of this op
