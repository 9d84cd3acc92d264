from setuptools import find_packages, setup

setup(
    package_dir={"moss_kernels": "moss_kernels", "moss_runtime": "runtime"},
    packages=find_packages(include=["moss_kernels*"])
    + ["moss_runtime"]
    + ["moss_runtime." + name for name in find_packages("runtime")],
)
