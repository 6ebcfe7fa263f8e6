"""The expert cache without devices: who keeps which slot, what is fetched ahead, and what that costs.

`residency` is the one state machine that the run time and the simulator drive; `policies` say who leaves, `predictors`
who is fetched ahead, `belady` what the best possible policy would do, `simulate` what a recorded trace costs.
Numpy and the standard library only.
"""
