#!/bin/sh
# Remove from a virtual environment what no process of a role reads, and compile what it imports at its start:
#   slim.sh DIRECTORY ROLE
set -eu
directory=$1 role=$2
packages=$(echo "$directory"/lib/python3*/site-packages)

# Installers, tests of libraries, and torch's headers and programs for building extensions. Megatron imports setuptools.
cd "$packages"
rm -rf pip pip-* torch/include torch/test torch/share
[ "$role" = learner ] || rm -rf setuptools setuptools-* pkg_resources
find torch/bin -type f ! -name torch_shm_manager -delete 2>/dev/null || true
find numpy sympy networkx mpmath pyarrow -type d -name tests -prune -exec rm -rf {} + 2>/dev/null || true
find pyarrow -type d -name include -prune -exec rm -rf {} + 2>/dev/null || true
find . -type f \( -name '*.a' -o -name '*.pyi' -o -name '*.pxd' \) -delete

# Symbol tables of torch are 89 MB. Libraries that auditwheel has changed (numpy.libs) do not survive strip, so no others.
if [ -d torch/lib ]; then
    find torch/lib -type f -name 'lib*.so*' -exec strip --strip-unneeded {} +
fi
find uvloop -type f -name '*.so' -exec strip --strip-unneeded {} +

# On a read-only root every start would compile all modules again. Modules that no start imports stay uncompiled: they are the larger part.
case $role in
engine) modules="tidemill.actors.serving.engine_process tidemill.actors.serving.builtin.engine" ;;
learner) modules="tidemill.launch.run.feeder_process tidemill.learner.ranks.rank tidemill.learner.backends.megatron.model" ;;
*) modules="tidemill.actors.actor.process" ;;
esac
for module in tidemill.launch.run.workers tidemill.launch.run.bus_process $modules; do
    "$directory/bin/python" -c "import $module"
done
for command in bus learner engine actor host prepare; do
    "$directory/bin/tidemill" "$command" --help >/dev/null
done
