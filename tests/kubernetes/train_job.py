"""Read a TrainJob by the types of Kubeflow's API, in their environment: PYTHON train_job.py FILE

They drop fields that they do not know, so the file must come back as it was. Imports nothing of ours.
"""

import sys

import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob


def main(file: str) -> int:
    with open(file) as text:
        document = yaml.safe_load(text)
    read = TrainerV1alpha1TrainJob.from_dict(document)
    return 0 if read is not None and read.to_dict() == document else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
