"""Files and logins."""

import os
import pathlib
import shutil
import subprocess

from trial import Failed, Missing, entry, free_port, program


@entry("sshd", "scp of 256 MiB", "MB/s")
def scp(trial):
    if os.geteuid() != 0:
        raise Missing("root, for sshd")
    port, folder = free_port(), trial.folder
    for name in ("host", "user"):
        subprocess.run(
            [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    os.chmod(folder, 0o700)
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    configuration = folder / "sshd_config"
    configuration.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nPermitRootLogin yes\nUsePAM no\n"
        "Subsystem sftp internal-sftp\n"
    )
    trial.serve([program("sshd"), "-D", "-e", "-f", str(configuration)], port)
    content = os.urandom(256 << 20)
    (folder / "big").write_bytes(content)
    options = ["-i", str(folder / "user"), "-P", str(port), "-F", "/dev/null", "-q"]
    for option in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"):
        options += ["-o", option]
    _, seconds = trial.client([program("scp"), *options, str(folder / "big"), f"root@127.0.0.1:{folder}/copy"])
    if (folder / "copy").read_bytes() != content:
        raise Failed("the copy differs")
    return len(content) / 1e6 / seconds


@entry("git daemon", "git clone of 20 MB", "MB/s")
def git(trial):
    port, source = free_port(), trial.folder / "source"
    tool = program("git")
    quiet = {"check": True, "capture_output": True}
    subprocess.run([tool, "init", "-q", str(source)], **quiet)
    (source / "big").write_bytes(os.urandom(20 << 20))
    author = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run([tool, "-C", str(source), "add", "big"], **quiet)
    subprocess.run([tool, "-C", str(source), *author, "commit", "-q", "-m", "one"], **quiet)
    trial.serve(
        [tool, "daemon", "--export-all", "--listen=127.0.0.1", f"--port={port}", f"--base-path={trial.folder}"], port
    )
    _, seconds = trial.client([tool, "clone", "-q", f"git://127.0.0.1:{port}/source", str(trial.folder / "copy")])
    if (trial.folder / "copy/big").read_bytes() != (source / "big").read_bytes():
        raise Failed("the copy differs")
    return 20 * 1.048576 / seconds


@entry("rsync daemon", "rsync of 512 MiB", "MB/s")
def rsync(trial):
    port, folder = free_port(), trial.folder
    content = os.urandom(512 << 20)
    (folder / "source").mkdir()
    (folder / "source/big").write_bytes(content)
    configuration = folder / "rsyncd.conf"
    configuration.write_text(f"use chroot = no\n[source]\npath = {folder}/source\nuid = {os.getuid()}\n")
    server = [program("rsync"), "--daemon", "--no-detach", "--address=127.0.0.1", f"--port={port}"]
    trial.serve([*server, f"--config={configuration}"], port)
    _, seconds = trial.client([program("rsync"), f"rsync://127.0.0.1:{port}/source/big", str(folder / "copy")])
    if (folder / "copy").read_bytes() != content:
        raise Failed("the copy differs")
    return len(content) / 1e6 / seconds


@entry("vsftpd", "curl, 64 MiB up and down", "MB/s")
def vsftpd(trial):
    if os.geteuid() != 0:
        raise Missing("root, for vsftpd")
    port, folder = free_port(), trial.folder
    for name in ("empty", "files", "files/upload"):
        (folder / name).mkdir()
    os.chmod(folder, 0o755)
    shutil.chown(folder / "files/upload", "ftp")
    configuration = folder / "vsftpd.conf"
    configuration.write_text(
        f"listen=YES\nlisten_address=127.0.0.1\nlisten_port={port}\nbackground=NO\nanonymous_enable=YES\n"
        f"anon_root={folder}/files\nanon_upload_enable=YES\nwrite_enable=YES\nanon_umask=022\n"
        f"secure_chroot_dir={folder}/empty\nftp_username=ftp\n"
    )
    trial.serve([program("vsftpd"), str(configuration)], port)
    content = os.urandom(64 << 20)
    (folder / "big").write_bytes(content)
    url, quiet = f"ftp://127.0.0.1:{port}/upload/big", [program("curl"), "--silent", "--show-error"]
    _, up_seconds = trial.client([*quiet, "--upload-file", str(folder / "big"), url])
    _, down_seconds = trial.client([*quiet, "--output", str(folder / "copy"), url])
    if (folder / "copy").read_bytes() != content:
        raise Failed("the copy differs")
    return 2 * len(content) / 1e6 / (up_seconds + down_seconds)
