"""Preference data: pairs of answers for DPO and reward models, single answers for KTO."""
