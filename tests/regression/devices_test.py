#!/usr/bin/env python3
"""tools/regression/devices.py: GPUs from a stand-in for nvidia-smi, and claims against real other processes."""

import contextlib
import os
import pathlib
import platform
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import unittest
from unittest import mock

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from regression import devices
from regression.devices import DeviceError, Gpu, GpuClaims, candidate_ports, claim_port, find_devices

FOUR_GPUS = "".join(f"{i}, GPU-{i}a{i}a-{i}, NVIDIA H200, 570.10\n" for i in range(4))


class WithFolder(unittest.TestCase):
    def setUp(self):
        self.contexts = contextlib.ExitStack()
        self.addCleanup(self.contexts.close)
        self.folder = pathlib.Path(self.contexts.enter_context(tempfile.TemporaryDirectory()))
        self.claims = self.folder / "claims"
        self.contexts.enter_context(mock.patch.object(devices, "CLAIMS_FOLDER", self.claims))

    def fake_nvidia_smi(self, script):
        """`script` is sh; "$1" is the query."""
        bin_folder = self.folder / "bin"
        bin_folder.mkdir(exist_ok=True)
        program = bin_folder / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + script)
        program.chmod(0o755)
        self.contexts.enter_context(mock.patch.dict(os.environ, {"PATH": f"{bin_folder}:{os.environ['PATH']}"}))

    def fake_gpus(self, text):
        (self.folder / "gpus").write_text(text)
        self.fake_nvidia_smi(
            f"""[ "$*" = "--query-gpu=index,uuid,name,driver_version --format=csv,noheader" ] || exit 9
            cat '{self.folder}/gpus'"""
        )


class FindDevices(WithFolder):
    def indices(self, visible, **more):
        return [gpu.index for gpu in find_devices("cuda", {"CUDA_VISIBLE_DEVICES": visible, **more}).gpus]

    def test_without_nvidia_smi_there_are_no_gpus(self):
        with mock.patch.dict(os.environ, {"PATH": str(self.folder)}):
            found = find_devices("auto", {})
            self.assertEqual(found, devices.Devices("cpu", "cpu-" + platform.machine()))
            with self.assertRaisesRegex(DeviceError, r"^\[device\] --device cuda, but nvidia-smi lists no GPU"):
                find_devices("cuda", {})

    def test_all_gpus_are_found_unless_some_are_hidden(self):
        self.fake_gpus(FOUR_GPUS)
        found = find_devices("auto", {})
        self.assertEqual((found.kind, found.name, found.driver), ("cuda", "NVIDIA H200", "570.10"))
        self.assertEqual(found.gpus[2], Gpu(2, "GPU-2a2a-2", "NVIDIA H200"))
        self.assertEqual(len(found.gpus), 4)

    def test_cpu_does_not_ask_for_gpus(self):
        self.fake_nvidia_smi("exit 1\n")
        self.assertEqual(find_devices("cpu", {}).kind, "cpu")

    def test_visible_devices_are_numbers_and_uuids_in_their_order(self):
        self.fake_gpus(FOUR_GPUS)
        self.assertEqual(self.indices("3,1"), [3, 1])
        self.assertEqual(self.indices("GPU-2a2a-2, 0"), [2, 0])
        self.assertEqual(self.indices("GPU-3a"), [3])
        self.assertEqual(self.indices("1,-1,2"), [1])
        self.assertEqual(self.indices("MIG-5c89852c,1"), [1])

    def test_hidden_gpus_are_none(self):
        self.fake_gpus(FOUR_GPUS)
        for visible in ("", "-1", "NoDevFiles", "MIG-5c89852c"):
            with self.subTest(visible):
                self.assertEqual(find_devices("auto", {"CUDA_VISIBLE_DEVICES": visible}).kind, "cpu")
                with self.assertRaisesRegex(DeviceError, f"CUDA_VISIBLE_DEVICES={visible} leaves none of the 4 GPUs"):
                    self.indices(visible)

    def test_visible_devices_that_name_no_gpu_are_refused(self):
        self.fake_gpus(FOUR_GPUS)
        for visible, message in (
            ("4", "'4', which is 0 of"),
            ("0,x", "'x', which is 0 of"),
            ("GPU-", "'GPU-', which is 4 of"),
            ("1,1", "names GPU 1 twice"),
            ("1,GPU-1a1a-1", "names GPU 1 twice"),
            ("0,,1", "'', which is 0 of"),
        ):
            with self.subTest(visible), self.assertRaisesRegex(DeviceError, message):
                self.indices(visible)

    def test_numbers_of_unlike_gpus_need_an_order(self):
        self.fake_gpus("0, GPU-a, NVIDIA A100, 570\n1, GPU-b, NVIDIA H200, 570\n")
        self.assertEqual(find_devices("auto", {}).name, "NVIDIA A100 + NVIDIA H200")
        self.assertEqual(self.indices("GPU-b"), [1])
        self.assertEqual(self.indices("1", CUDA_DEVICE_ORDER="PCI_BUS_ID"), [1])
        with self.assertRaisesRegex(DeviceError, "numbers unlike GPUs"):
            self.indices("1")

    def test_an_nvidia_smi_that_fails_or_makes_no_sense_is_an_error(self):
        for script, message in (
            ("echo couldn\\'t communicate with the driver; exit 9\n", "ended with 9: couldn't communicate"),
            ("echo 0, GPU-a\n", "nvidia-smi wrote '0, GPU-a', expected"),
            ("echo x, GPU-a, H200, 570\n", "nvidia-smi wrote 'x, GPU-a, H200, 570', expected"),
        ):
            self.fake_nvidia_smi(script)
            with self.subTest(script), self.assertRaisesRegex(DeviceError, message):
                find_devices("auto", {})
        self.fake_nvidia_smi("echo No devices were found; exit 6\n")
        self.assertEqual(find_devices("auto", {}).kind, "cpu")

    def test_a_misspelled_choice_is_refused(self):
        with self.assertRaisesRegex(DeviceError, "no device 'gpu', expected auto, cpu or cuda"):
            find_devices("gpu", {})

    def test_memory_and_processes_of_gpus(self):
        self.fake_nvidia_smi(
            """case $1 in
            --query-gpu=uuid,memory.used) echo 'GPU-a, 512 MiB'; echo 'GPU-b, [N/A]';;
            --query-compute-apps=gpu_uuid,pid) echo 'GPU-a, 71'; echo 'GPU-a, 72'; echo 'GPU-b, [N/A]';;
            *) exit 9;; esac
            """
        )
        self.assertEqual(devices.memory_used(), {"GPU-a": 512})
        self.assertEqual(devices.compute_pids(), {"GPU-a": {71, 72}})


class Claims(WithFolder):
    GPUS = [Gpu(i, f"GPU-{i}", "NVIDIA H200") for i in range(3)]

    def other_runner(self, count):
        """A process that claims `count` of GPUS, says so, and waits to be killed."""
        code = f"""
            import pathlib, sys, time
            sys.path.insert(0, {str(TOOLS)!r})
            from regression import devices
            devices.CLAIMS_FOLDER = pathlib.Path({str(self.claims)!r})
            gpus = [devices.Gpu(i, f"GPU-{{i}}", "NVIDIA H200") for i in range(3)]
            with devices.GpuClaims(gpus, {count}, 0), devices.claim_port() as port:
                print(port, flush=True)
                time.sleep(600)
        """
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process, int(process.stdout.readline())

    def test_two_runners_get_different_gpus(self):
        other, _ = self.other_runner(2)
        with GpuClaims(self.GPUS, 1, 0) as claimed:
            self.assertEqual([gpu.index for gpu in claimed], [2])
        with self.assertRaisesRegex(
            DeviceError,
            r"no 2 free GPUs of 3 within 0 s; claimed by other runners: "
            rf"GPU 0 \(GPU-0\) by process {other.pid}, GPU 1 \(GPU-1\) by process {other.pid}$",
        ):
            GpuClaims(self.GPUS, 2, 0).__enter__()
        # What the failed attempt got hold of is free again.
        with GpuClaims(self.GPUS, 1, 0) as claimed:
            self.assertEqual([gpu.index for gpu in claimed], [2])

    def test_claims_end_with_a_killed_runner_and_a_waiting_one_gets_them(self):
        other, _ = self.other_runner(3)
        with mock.patch.object(devices.time, "sleep", side_effect=lambda _: (other.kill(), other.wait())) as slept:
            with GpuClaims(self.GPUS, 3, 60) as claimed:
                self.assertEqual(len(claimed), 3)
        self.assertEqual(slept.call_count, 1)

    def test_claims_end_with_their_block_and_leave_no_file(self):
        with GpuClaims(self.GPUS, 3, 0), claim_port():
            self.assertEqual(len(list(self.claims.iterdir())), 4)
        self.assertEqual(list(self.claims.iterdir()), [])

    def test_more_gpus_than_there_are_is_an_error(self):
        with self.assertRaisesRegex(DeviceError, "4 GPUs asked for, this process may use 3"):
            GpuClaims(self.GPUS, 4, 0)

    def test_two_runners_get_different_ports(self):
        _, taken = self.other_runner(0)
        with mock.patch.object(devices, "candidate_ports", return_value=[taken]):
            with self.assertRaisesRegex(DeviceError, f"none of 1 ports from {taken} to {taken} is free"):
                claim_port().__enter__()
        with mock.patch.object(devices, "candidate_ports", return_value=[taken, taken + 1]), claim_port() as port:
            self.assertEqual(port, taken + 1)

    def test_a_port_in_use_is_not_claimed(self):
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with self.subTest(address), socket.socket(family) as server:
                with claim_port() as port:
                    self.assertTrue(devices.is_free(port))
                server.bind((address, port))
                server.listen()
                self.assertFalse(devices.is_free(port))
                with mock.patch.object(devices, "candidate_ports", return_value=[port]):
                    with self.assertRaisesRegex(DeviceError, f"none of 1 ports from {port} to {port} is free"):
                        claim_port().__enter__()
                self.assertEqual(list(self.claims.iterdir()), [])

    def test_a_claimed_port_can_be_listened_at(self):
        with claim_port() as port, socket.socket() as server:
            self.assertNotIn(port, devices.ephemeral_ports())
            server.bind(("", port))
            server.listen()

    def test_ports_are_outside_of_what_others_take(self):
        ports = candidate_ports(range(32768, 61000))
        self.assertEqual((min(ports), max(ports)), (10000, 65535))
        for taken in (15000, 24999, 29400, 29500, 32768, 60999):
            self.assertNotIn(taken, ports)
        for free in (14999, 25000, 32767, 61000):
            self.assertIn(free, ports)
        # Nothing is left outside: better inside than not at all.
        self.assertIn(40000, candidate_ports(range(1024, 65536)))

    def test_a_folder_of_claims_that_others_may_write_is_refused(self):
        self.claims.symlink_to(self.folder)
        with self.assertRaisesRegex(DeviceError, "claims is not a folder of this user; remove it"):
            claim_port().__enter__()

    def test_the_folder_of_claims_is_private(self):
        with claim_port():
            self.assertEqual(stat.S_IMODE(self.claims.stat().st_mode), 0o700)


if __name__ == "__main__":
    unittest.main()
