//! The C programs that measure: compiled once with the machine's compiler, cached by content, and their output parsed.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use stats::Latencies;

/// One of the programs in `probes/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    RoundTrip,
    Stream,
    Connects,
    Floor,
    Resp,
    Load,
    Overhead,
}

const COMMON: &str = include_str!("../probes/common.h");
/// Ordinary optimisation for the baseline of the architecture, as in a distribution.
const FLAGS: [&str; 3] = ["-O2", "-pthread", "-std=gnu11"];
const REMEDY: &str = "install a C compiler (apt-get install gcc libc6-dev) or name one in CC";

impl Probe {
    const ALL: [Self; 7] =
        [Self::RoundTrip, Self::Stream, Self::Connects, Self::Floor, Self::Resp, Self::Load, Self::Overhead];

    fn name(self) -> &'static str {
        match self {
            Self::RoundTrip => "rtt",
            Self::Stream => "stream",
            Self::Connects => "connects",
            Self::Floor => "floor",
            Self::Resp => "resp",
            Self::Load => "load",
            Self::Overhead => "overhead",
        }
    }

    fn source(self) -> &'static str {
        match self {
            Self::RoundTrip => include_str!("../probes/rtt.c"),
            Self::Stream => include_str!("../probes/stream.c"),
            Self::Connects => include_str!("../probes/connects.c"),
            Self::Floor => include_str!("../probes/floor.c"),
            Self::Resp => include_str!("../probes/resp.c"),
            Self::Load => include_str!("../probes/load.c"),
            Self::Overhead => include_str!("../probes/overhead.c"),
        }
    }
}

/// The compiled probes.
pub struct Probes {
    directory: PathBuf,
}

impl Probes {
    /// Compiles the probes that the cache does not contain. Without a usable cache, they are placed in `scratch`.
    pub fn build(scratch: &Path) -> Result<Self> {
        let compiler = std::env::var_os("CC").filter(|name| !name.is_empty()).unwrap_or_else(|| OsString::from("cc"));
        let cache = cache_directory().and_then(|cache| private_directory(&cache.join(content_key(&compiler))));
        Self::build_in(cache.unwrap_or_else(|| scratch.to_owned()), &compiler)
    }

    fn build_in(directory: PathBuf, compiler: &OsString) -> Result<Self> {
        let probes = Self { directory };
        for probe in Probe::ALL {
            if !probes.path(probe).is_file() {
                compile(probe, &probes, compiler)?;
            }
        }
        Ok(probes)
    }

    pub fn path(&self, probe: Probe) -> PathBuf {
        self.directory.join(probe.name())
    }
}

fn content_key(compiler: &OsString) -> String {
    // The hash distinguishes versions of the probes. It is not a protection, which the permissions of the cache
    // provide.
    let mut hasher = DefaultHasher::new();
    (COMMON, FLAGS, compiler).hash(&mut hasher);
    Probe::ALL.map(Probe::source).hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

fn cache_directory() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("crosslane/probes"))
}

/// Creates the directory if needed, and returns it if no other user can write to it.
fn private_directory(path: &Path) -> Option<PathBuf> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).ok()?;
    let metadata = fs::symlink_metadata(path).ok()?;
    let private =
        metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o022 == 0;
    private.then(|| path.to_owned())
}

fn compile(probe: Probe, probes: &Probes, compiler: &OsString) -> Result<()> {
    let build = tempfile::Builder::new().prefix("build-").tempdir_in(&probes.directory);
    let build = build.with_context(|| format!("making a directory in {}", probes.directory.display()))?;
    let (source, program) = (build.path().join("probe.c"), build.path().join("probe"));
    fs::write(build.path().join("common.h"), COMMON)
        .and_then(|()| fs::write(&source, probe.source()))
        .context("writing a probe")?;
    let output = match Command::new(compiler).args(FLAGS).arg(&source).arg("-o").arg(&program).output() {
        Ok(output) => output,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!(
                "no C compiler: `{}` was not found, and the benchmark's programs are in C; {REMEDY}",
                compiler.to_string_lossy()
            )
        }
        Err(error) => bail!("cannot start the C compiler `{}`: {error}; {REMEDY}", compiler.to_string_lossy()),
    };
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let first = stderr
            .lines()
            .find(|line| line.contains("error"))
            .or_else(|| stderr.lines().next())
            .unwrap_or("it printed no message");
        bail!("`{}` could not compile the probe '{}': {first}; {REMEDY}", compiler.to_string_lossy(), probe.name());
    }
    // A rename is atomic, so that a concurrent run never starts an incomplete program.
    fs::rename(&program, probes.path(probe)).with_context(|| format!("caching the probe '{}'", probe.name()))
}

/// The output of a probe: lines `NAME VALUE` and `hist NS COUNT`.
#[derive(Debug, Default)]
pub struct ProbeOutput {
    values: Vec<(String, f64)>,
    pairs: Vec<(String, f64, f64)>,
}

impl ProbeOutput {
    pub fn parse(lines: &[String]) -> Result<Self> {
        let mut output = Self::default();
        for line in lines {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let number = |word: &str| word.parse::<f64>().ok().filter(|value| value.is_finite());
            match words.as_slice() {
                [name, first] if number(first).is_some() => {
                    output.values.push(((*name).to_owned(), number(first).unwrap_or_default()))
                }
                [name, first, second] => match (number(first), number(second)) {
                    (Some(first), Some(second)) => output.pairs.push(((*name).to_owned(), first, second)),
                    _ => bail!("a probe printed '{line}', which is not a result"),
                },
                _ => bail!("a probe printed '{line}', which is not a result"),
            }
        }
        Ok(output)
    }

    pub fn value(&self, name: &str) -> Result<f64> {
        let found = self.values.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| *value).with_context(|| format!("a probe did not print its '{name}'"))
    }

    /// Returns all lines `NAME VALUE`, in order.
    pub fn values(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().map(|(name, value)| (name.as_str(), *value))
    }

    pub fn pairs<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (f64, f64)> + 'a {
        self.pairs.iter().filter(move |(known, _, _)| known == name).map(|(_, first, second)| (*first, *second))
    }

    pub fn latencies(&self) -> Result<Latencies> {
        let mut latencies = Latencies::new();
        for (ns, count) in self.pairs("hist") {
            latencies.add(ns, count as u64);
        }
        ensure!(latencies.samples() > 0, "a probe timed nothing");
        latencies.set_max(self.value("max_ns")?);
        Ok(latencies)
    }

    /// Returns the value `name` divided by the seconds.
    pub fn per_second(&self, name: &str) -> Result<f64> {
        let seconds = self.value("seconds")?;
        ensure!(seconds > 0.0, "a probe measured for no time");
        Ok(self.value(name)? / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ProbeOutput> {
        ProbeOutput::parse(&text.lines().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn output_is_parsed() {
        let output = parse("hist 80.00 3\nhist 160.50 1\nmax_ns 161.00\nbytes 500\nseconds 0.25").unwrap();
        let quantiles = output.latencies().unwrap().quantiles();
        assert_eq!((quantiles.samples, quantiles.max_ns), (4, 161.0));
        assert_eq!(output.per_second("bytes").unwrap(), 2000.0);
    }

    #[test]
    fn an_invalid_line_is_shown_in_the_error() {
        for line in ["hist 1 x", "usage: rtt", "max_ns nan", "a b c d"] {
            assert!(parse(line).unwrap_err().to_string().contains(line), "{line}");
        }
        assert!(parse("bytes 5").unwrap().value("seconds").is_err());
        assert!(parse("bytes 5\nseconds 0").unwrap().per_second("bytes").is_err());
        assert!(parse("max_ns 5").unwrap().latencies().is_err());
    }

    #[test]
    fn a_missing_compiler_is_named_with_its_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let error =
            Probes::build_in(directory.path().to_owned(), &OsString::from("no-such-cc")).err().unwrap().to_string();
        assert!(error.contains("no-such-cc") && error.contains("apt-get install gcc"), "{error}");
    }

    #[test]
    fn every_probe_compiles_and_refuses_wrong_use() {
        let directory = tempfile::tempdir().unwrap();
        let probes = Probes::build_in(directory.path().to_owned(), &OsString::from("cc")).unwrap();
        for probe in Probe::ALL {
            let output = Command::new(probes.path(probe)).arg("nonsense").output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{probe:?}");
            assert!(String::from_utf8_lossy(&output.stderr).starts_with("usage: "), "{probe:?}");
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), Probe::ALL.len(), "only the programs remain");
    }

    #[test]
    fn a_cache_that_others_can_write_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        assert!(private_directory(directory.path()).is_some());
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(private_directory(directory.path()).is_none());
    }
}
