"""The steps of training: rows, losses, the optimizer's rules, the models beside the policy. Knows no backend."""
