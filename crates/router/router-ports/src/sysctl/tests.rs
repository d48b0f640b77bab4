//! Settings of namespaces that exist during a test. A process that is killed is one that forgets its settings: neither
//! restores anything.

use std::mem;
use std::process::Command;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::Namespace;
use crate::namespace;

#[test]
fn changed_settings_are_restored() {
    let Some(namespace) = namespace::for_test("changed_settings_are_restored") else { return };
    let test = || {
        let read = |name: &str| fs::read_to_string(format!("/proc/sys/net/{name}")).unwrap().trim().to_string();
        let mut outer = Sysctls::new();
        outer.set("net/ipv4/conf/lo/forwarding", "1").unwrap();
        outer.set("net/ipv6/conf/all/forwarding", "1").unwrap();
        for of in ["ipv4/conf/lo", "ipv4/conf/all", "ipv6/conf/lo"] {
            outer.set(&format!("net/{of}/accept_redirects"), "1").unwrap();
        }
        let mut inner = Sysctls::new();
        inner.configure_port("lo").unwrap();
        inner.configure_tun("lo").unwrap();
        assert_eq!([read("ipv4/conf/lo/forwarding"), read("ipv6/conf/all/forwarding")], ["0", "0"]);
        let redirects = ["ipv4/conf/lo", "ipv4/conf/all", "ipv6/conf/lo"].map(|of| format!("{of}/accept_redirects"));
        assert_eq!(redirects.each_ref().map(|name| read(name)), ["0", "0", "0"]);
        drop(inner);
        assert_eq!([read("ipv4/conf/lo/forwarding"), read("ipv6/conf/all/forwarding")], ["1", "1"]);
        assert_eq!(redirects.each_ref().map(|name| read(name)), ["1", "1", "1"]);
        // An interface that is removed and added again, and then is no longer a port.
        let mut again = Sysctls::new();
        for _ in 0..3 {
            again.configure_port("lo").unwrap();
            fs::write("/proc/sys/net/ipv4/conf/lo/forwarding", "1").unwrap();
        }
        assert_eq!(
            again.changed.iter().filter(|setting| setting.name.path().ends_with("ipv4/conf/lo/forwarding")).count(),
            1
        );
        again.configure_port("lo").unwrap();
        again.restore("lo");
        assert_eq!([read("ipv4/conf/lo/forwarding"), read("ipv6/conf/all/forwarding")], ["1", "0"]);
        assert_eq!(redirects.each_ref().map(|name| read(name)), ["1", "0", "1"]);
        drop(again);
        assert_eq!(redirects.each_ref().map(|name| read(name)), ["1", "1", "1"]);
        let error = outer.set("net/ipv4/conf/gone0/forwarding", "1").unwrap_err().to_string();
        assert!(error.starts_with("setting net/ipv4/conf/gone0/forwarding to 1: "), "{error}");
    };
    namespace.within(test).unwrap();
}

fn read(name: &str) -> String {
    fs::read_to_string(Path::new("/proc/sys/net").join(name)).unwrap().trim().to_owned()
}

fn write(name: &str, value: &str) {
    fs::write(Path::new("/proc/sys/net").join(name), value).unwrap();
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

const CHANGED: [&str; 3] = ["ipv4/conf/d0/forwarding", "ipv6/conf/all/forwarding", "ipv4/conf/d0/rp_filter"];

/// A namespace with an interface `d0` whose settings are all 1, and a file for changed settings.
fn lab(test: &str) -> Option<(Namespace, TempDir, PathBuf)> {
    let namespace = namespace::for_test(test)?;
    let set_up = || {
        ip("link add d0 type veth peer name p0");
        CHANGED.into_iter().for_each(|name| write(name, "1"));
    };
    namespace.within(set_up).unwrap();
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("a.sysctls");
    Some((namespace, folder, file))
}

/// Changes the settings of `d0`, and returns without restoring them.
fn killed(file: &Path) {
    let mut sysctls = Sysctls::remembered_in(file, None).unwrap();
    sysctls.configure_port("d0").unwrap();
    assert_eq!(CHANGED.map(read), ["0"; 3]);
    mem::forget(sysctls);
}

#[test]
fn settings_found_first_are_restored_after_any_number_of_kills() {
    let Some((namespace, _folder, file)) = lab("settings_found_first_are_restored") else { return };
    let test = || {
        for kills in 0..4 {
            (0..kills).for_each(|_| killed(&file));
            let mut sysctls = Sysctls::remembered_in(&file, None).unwrap();
            sysctls.configure_port("d0").unwrap();
            assert!(file.exists());
            drop(sysctls);
            assert_eq!(CHANGED.map(read), ["1"; 3], "after {kills} kills");
            assert!(!file.exists(), "the file is removed at an orderly end");
        }
        // Without a further start.
        killed(&file);
        assert!(
            matches!(Sysctls::restore_leftover(&file).unwrap(), Leftover::Restored(count) if count >= CHANGED.len())
        );
        assert_eq!((CHANGED.map(read), file.exists()), (["1".to_owned(), "1".to_owned(), "1".to_owned()], false));
        // A process of another file takes over what the killed one has left.
        killed(&file);
        let other = file.with_file_name("b.sysctls");
        let mut sysctls = Sysctls::remembered_in(&other, None).unwrap();
        sysctls.take_over_from(&file).unwrap();
        sysctls.configure_port("d0").unwrap();
        drop(sysctls);
        assert_eq!((CHANGED.map(read), file.exists()), (["1".to_owned(), "1".to_owned(), "1".to_owned()], false));
    };
    namespace.within(test).unwrap();
}

/// The settings of `d0`, a port, and of `p0`, `lo` and `default`, for which the kernel is a host or a router.
const OF_V6: [&str; 4] = ["d0", "p0", "lo", "default"];

fn forwarding_v6() -> String {
    ["all"].iter().chain(&OF_V6).map(|scope| read(&format!("ipv6/conf/{scope}/forwarding"))).collect()
}

#[test]
fn interfaces_that_are_not_ports_keep_their_forwarding() {
    let Some((namespace, _folder, file)) = lab("interfaces_that_are_not_ports_keep_their_forwarding") else { return };
    let test = || {
        for all in ["0", "1"] {
            for is_killed in [false, true] {
                write("ipv6/conf/all/forwarding", all);
                write("ipv6/conf/p0/forwarding", "0");
                write("ipv6/conf/lo/forwarding", "1");
                let found = forwarding_v6();
                let mut sysctls = Sysctls::remembered_in(&file, None).unwrap();
                sysctls.configure_port("d0").unwrap();
                assert_eq!(forwarding_v6(), format!("0001{all}"), "after {found}");
                for _ in 0..2 {
                    sysctls.set_forwarding(true, &["d0"], "d0", true).unwrap();
                    assert_eq!(forwarding_v6(), format!("1101{all}"), "after {found}");
                    sysctls.configure_port("d0").unwrap();
                    sysctls.set_forwarding(false, &["d0"], "d0", true).unwrap();
                    assert_eq!(forwarding_v6(), format!("0001{all}"), "after {found}");
                }
                sysctls.set_forwarding(true, &["d0"], "d0", true).unwrap();
                if is_killed {
                    sysctls.forget();
                    assert!(matches!(Sysctls::restore_leftover(&file).unwrap(), Leftover::Restored(1..)));
                } else {
                    drop(sysctls);
                }
                assert_eq!(forwarding_v6(), found, "killed: {is_killed}");
            }
        }
    };
    namespace.within(test).unwrap();
}

#[test]
fn a_setting_that_someone_else_has_changed_is_kept() {
    let Some((namespace, _folder, file)) = lab("a_setting_that_someone_else_has_changed") else { return };
    let test = || {
        killed(&file);
        // The administrator wants loose filtering; the router overrides it as long as it runs.
        write("ipv4/conf/d0/rp_filter", "2");
        let mut sysctls = Sysctls::remembered_in(&file, None).unwrap();
        sysctls.configure_port("d0").unwrap();
        assert_eq!(CHANGED.map(read), ["0"; 3]);
        drop(sysctls);
        assert_eq!(CHANGED.map(read), ["1", "1", "2"]);
        // While the router runs, and it is killed thereafter.
        let mut sysctls = Sysctls::remembered_in(&file, None).unwrap();
        sysctls.configure_port("d0").unwrap();
        write("ipv4/conf/d0/rp_filter", "1");
        mem::forget(sysctls);
        Sysctls::restore_leftover(&file).unwrap();
        assert_eq!(CHANGED.map(read), ["1", "1", "1"]);
    };
    namespace.within(test).unwrap();
}

#[test]
fn interfaces_that_are_renamed_removed_or_made_anew_are_told_apart() {
    let Some((namespace, _folder, file)) = lab("interfaces_that_are_renamed") else { return };
    let test = || {
        killed(&file);
        ip("link set d0 name d1");
        ip("link add d0 type veth peer name p1");
        write("ipv4/conf/d0/rp_filter", "0");
        Sysctls::restore_leftover(&file).unwrap();
        assert_eq!([read("ipv4/conf/d1/rp_filter"), read("ipv4/conf/d0/rp_filter")], ["1", "0"]);
        write("ipv4/conf/d0/rp_filter", "1");
        killed(&file);
        ip("link del d0");
        Sysctls::restore_leftover(&file).unwrap();
        assert_eq!([&read("ipv6/conf/all/forwarding"), &read("ipv4/conf/all/rp_filter")], ["1", "0"]);
    };
    namespace.within(test).unwrap();
}

#[test]
fn settings_of_another_namespace_or_boot_are_not_touched() {
    let test = "settings_of_another_namespace_or_boot";
    let (Some((namespace, _folder, file)), Some((other, _other_folder, _))) = (lab(test), lab(test)) else { return };
    namespace.within(|| killed(&file)).unwrap();
    let zeros = || CHANGED.into_iter().for_each(|name| write(name, "0"));
    let restored = || (Sysctls::restore_leftover(&file).unwrap(), CHANGED.map(read));
    let zero = ["0"; 3].map(str::to_owned);
    other.within(zeros).unwrap();
    assert_eq!(other.within(restored).unwrap(), (Leftover::OfAnotherNamespace, zero.clone()));
    // The same cookie, after the machine was started anew.
    let text = fs::read_to_string(&file).unwrap();
    let boot_id = text.lines().nth(1).unwrap().split(' ').next().unwrap().to_owned();
    let (body, _) = text.trim_end().rsplit_once('\n').unwrap();
    let body = format!("{}\n", body.replace(&boot_id, "0123"));
    fs::write(&file, format!("{body}{:016x}\n", journal::checksum(&body))).unwrap();
    assert!(!Sysctls::is_damaged(&file));
    assert_eq!(namespace.within(restored).unwrap(), (Leftover::OfAnotherNamespace, zero));
}

proptest! {
    #[test]
    fn a_damaged_file_is_detected(at in 0..1000usize, byte in any::<u8>(), is_cut in any::<bool>()) {
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("a.sysctls");
        let name = Name::parse("net/ipv4/conf/eth0/forwarding").unwrap();
        let journal = Journal::new(&file, Some(Path::new("/run/netns/a"))).unwrap();
        journal.write(&[Setting::new(name, None, "1", "0")]).unwrap();
        prop_assert!(!Sysctls::is_damaged(&file));
        prop_assert_eq!(journal.read_for_same_namespace(&file).map(|settings| settings.len()), Some(1));
        prop_assert_eq!(Sysctls::namespace_of(&file), Some(PathBuf::from("/run/netns/a")));
        let mut bytes = fs::read(&file).unwrap();
        let at = at % bytes.len();
        prop_assume!(is_cut || bytes[at] != byte);
        bytes[at] = byte;
        bytes.truncate(if is_cut { at } else { bytes.len() });
        fs::write(&file, bytes).unwrap();
        prop_assert!(Sysctls::is_damaged(&file));
        prop_assert!(journal.read_for_same_namespace(&file).is_none());
    }
}
