"""From a step to numbers: Rényi-DP, epsilon, delta, calibration, reports."""
