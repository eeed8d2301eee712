"""The ground: sampling parameters -> the target's distribution p, the rejection rules, the target and its cache."""
