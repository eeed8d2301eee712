"""Who proposes tokens: each file one drafter, behind the protocol of `drafters.base`."""
