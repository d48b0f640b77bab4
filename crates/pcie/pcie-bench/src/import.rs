//! Imports the data published with the pcie-bench paper (repository pcie-bench/data) as results.
//!
//! A folder is a system in one configuration, which its name states: `-iommu` means superpages, `-iommu-nosp` pages of
//! 4 KB, and `-s0-s1-s1` the sockets of device, memory and the controlling process. The first line of each file names
//! the columns; the column headed GB/s contains Gb/s. The distributions of a file are in `*_cdf.csv` next to it, one
//! block for each row, in the same order.

use std::fs;
use std::path::{Path, PathBuf};

use pcie::link::{Generation, Lanes, Link, TransferLimit};
use pcie::result::{Bandwidth, Latency, Outcome, Provenance, SCHEMA, TestResult};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};

use crate::error::{Error, Result};
use crate::files::read_text;
use crate::statistics::{quantile_of_cdf, trimmed_average};

/// All latencies are multiples of 16 cycles at 1.2 GHz.
const TIMER_STEP_NS: f64 = 40.0 / 3.0;

/// The imported results.
#[derive(Debug, Default)]
pub struct Imported {
    /// Results in the order of file names and rows.
    pub results: Vec<TestResult>,
    /// Number of rows skipped because this program does not model their cache state (`DThrash`: thrashed by the
    /// device).
    pub rows_skipped: usize,
}

type Row<T> = std::result::Result<T, String>;

/// Reads a file, or all files of a folder and of the folders in it.
///
/// # Errors
/// Names the file and the line that do not have the published form.
pub fn import(path: &Path) -> Result<Imported> {
    let mut imported = Imported::default();
    for file in files(path)? {
        read_file(&file, &mut imported)?;
    }
    if imported.results.is_empty() {
        return Error::wrong_use(format!("{}: no file of pcie-bench's data in it", path.display()));
    }
    Ok(imported)
}

/// Lists the files of figures, which are read together with their distributions.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let access = |source| Error::File { path: path.to_owned(), source };
    if !fs::metadata(path).map_err(access)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut entries = fs::read_dir(path).map_err(access)?.collect::<std::io::Result<Vec<_>>>().map_err(access)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    let mut found = Vec::new();
    for path in entries.into_iter().map(|entry| entry.path()) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else if name.ends_with(".csv") && !name.ends_with("_cdf.csv") {
            found.push(path);
        }
    }
    Ok(found)
}

fn read_file(path: &Path, imported: &mut Imported) -> Result<()> {
    let text = read_text(path)?;
    let bad = |line: usize, why: String| Error::WrongUse(format!("{}:{line}: {why}", path.display()));
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    let (_, head) = lines.next().unwrap_or_default();
    let columns = Columns::of(head).map_err(|why| bad(1, why))?;
    let system = System::of(path);
    let mut distributions = read_distributions(path)?.into_iter();
    for (number, line) in lines.filter(|(_, line)| !line.is_empty()) {
        let cells = Cells { columns: &columns, cells: line.split(',').collect() };
        let cdf = distributions.next().unwrap_or_default();
        match cells.result(&system, cdf).map_err(|why| bad(number, why))? {
            Some(result) => {
                result.test.check().map_err(|error| bad(number, error.to_string()))?;
                imported.results.push(result);
            }
            None => imported.rows_skipped += 1,
        }
    }
    Ok(())
}

/// Returns the blocks of `X_cdf.csv` next to `X.csv`; none if there is no such file.
fn read_distributions(path: &Path) -> Result<Vec<Vec<(f64, f64)>>> {
    let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let cdf_path = path.with_file_name(format!("{name}_cdf.csv"));
    if !cdf_path.exists() {
        return Ok(Vec::new());
    }
    let mut blocks: Vec<Vec<(f64, f64)>> = Vec::new();
    for (index, line) in read_text(&cdf_path)?.lines().enumerate().skip(1) {
        let cells: Vec<&str> = line.trim().split(',').collect();
        let point = match cells[..] {
            [_, ns, share] => ns.parse().ok().zip(share.parse().ok()),
            _ => None,
        };
        let Some((ns, share)) = point else {
            let location = format!("{}:{}", cdf_path.display(), index + 1);
            return Error::wrong_use(format!("{location}: '{line}' is not cycles, nanoseconds and a share"));
        };
        // Each block begins with its smallest latency and a share of zero.
        if share == 0.0 {
            blocks.push(Vec::new())
        } else if let Some(block) = blocks.last_mut() {
            block.push((ns, share))
        }
    }
    Ok(blocks)
}

/// The configuration that a folder's name and its device list describe.
struct System {
    name: String,
    folder: String,
    iommu: Iommu,
    numa: Numa,
    link: Option<Link>,
}

impl System {
    fn of(file: &Path) -> Self {
        let folder = file.parent().unwrap_or(Path::new(""));
        let folder = folder.canonicalize().unwrap_or(folder.to_owned());
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let iommu = match () {
            () if name.ends_with("-iommu-nosp") => Iommu::Pages4K,
            () if name.ends_with("-iommu") => Iommu::Pages2M,
            () => Iommu::Off,
        };
        let is_socket = |part: &&str| {
            part.strip_prefix('s').is_some_and(|number| number.len() == 1 && number.parse::<u8>().is_ok())
        };
        let sockets: Vec<&str> = name.split('-').filter(is_socket).collect();
        let is_remote = sockets.windows(2).any(|pair| pair[0] != pair[1]);
        let numa = if is_remote { Numa::Remote } else { Numa::Local };
        let devices = fs::read_to_string(folder.join("sys-lspci.txt")).unwrap_or_default();
        let short = name.split('-').next().unwrap_or_default().to_owned();
        Self { name: short, folder: name, iommu, numa, link: link_of(&devices) }
    }
}

/// Returns the link of the Netronome device in the output of `lspci -vv`.
fn link_of(devices: &str) -> Option<Link> {
    let mut blocks = devices.split("\n\n");
    let block = blocks.find(|block| block.contains("Netronome") && block.contains("LnkSta:"))?;
    let number_after = |line: &str, word: &str| {
        let rest = line.split(word).nth(1)?.trim_start();
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    };
    let status = block.lines().find(|line| line.contains("LnkSta:"))?;
    // DevCtl holds the limits in use, on the line with the request limit; DevCap holds the supported ones.
    let control = block.lines().find(|line| line.contains("MaxReadReq"))?;
    let generation = match number_after(status, "Speed")? {
        2 => 1,
        5 => 2,
        8 => 3,
        16 => 4,
        _ => return None,
    };
    Some(Link {
        generation: Generation::new(generation).ok()?,
        lanes: Lanes::new(u8::try_from(number_after(status, "Width x")?).ok()?).ok()?,
        mps_bytes: TransferLimit::new(number_after(control, "MaxPayload")?).ok()?,
        mrrs_bytes: TransferLimit::new(number_after(control, "MaxReadReq")?).ok()?,
        ..Link::PUBLISHED
    })
}

/// The names of the columns, in order.
struct Columns(Vec<String>);

impl Columns {
    fn of(head: &str) -> Row<Self> {
        if head.starts_with("cycles,ns,cdf") {
            return Err("distributions only; import the file of figures next to it".to_owned());
        }
        let columns: Vec<String> = head.split(',').map(|name| name.trim().to_owned()).collect();
        let is_known = ["Test", "PAT", "Cache", "HO", "DO", "WinSZ", "SZ"].iter().eq(columns.iter().take(7));
        if is_known { Ok(Self(columns)) } else { Err("not a file of pcie-bench: it has other columns".to_owned()) }
    }
}

struct Cells<'a> {
    columns: &'a Columns,
    cells: Vec<&'a str>,
}

impl Cells<'_> {
    fn text(&self, column: &str) -> Row<&str> {
        let index = self.columns.0.iter().position(|name| name == column);
        let cell = index.and_then(|index| self.cells.get(index));
        cell.map(|cell| cell.trim()).ok_or_else(|| format!("no column '{column}'"))
    }

    fn number(&self, column: &str) -> Row<f64> {
        let text = self.text(column)?;
        let number: Option<f64> = text.parse().ok();
        number
            .filter(|number| number.is_finite() && *number >= 0.0)
            .ok_or_else(|| format!("{column} is '{text}', which is not a number"))
    }

    fn bytes(&self, column: &str) -> Row<u32> {
        Ok(self.number(column)? as u32)
    }

    /// Returns the result of this row; `None` if this program does not model its cache state.
    fn result(&self, system: &System, cdf: Vec<(f64, f64)>) -> Row<Option<TestResult>> {
        let Some(cache) = self.cache()? else { return Ok(None) };
        let (kind, engine, engine_words) = self.kind()?;
        let order = if self.text("PAT")? == "Seq" { Order::Sequential } else { Order::Random };
        let test = |samples: f64| -> Row<Test> {
            Ok(Test {
                test: kind,
                size_bytes: self.bytes("SZ")?,
                window_bytes: self.number("WinSZ")? as u64,
                host_offset_bytes: self.bytes("HO")?,
                device_offset_bytes: self.bytes("DO")?,
                order,
                cache,
                iommu: system.iommu,
                numa: system.numa,
                samples: samples as u64,
                seed: 0,
            })
        };
        let (test, outcome) = if kind.is_latency() {
            (test(self.number("#samples")?)?, Outcome::Latency(self.latency(cdf)?))
        } else {
            (test(self.number("Trans")?)?, Outcome::Bandwidth(self.bandwidth()?))
        };
        Ok(Some(TestResult {
            schema: SCHEMA.to_owned(),
            provenance: Provenance::Published,
            device: format!("published:{}-{engine}", system.name),
            description: format!("{}, NFP-6000, {engine_words}", system.folder),
            link: system.link,
            prediction: None,
            test,
            outcome,
        }))
    }

    fn cache(&self) -> Row<Option<Cache>> {
        match self.text("Cache")? {
            "Cold" => Ok(Some(Cache::Cold)),
            "HWarm" => Ok(Some(Cache::HostWarm)),
            "DWarm" => Ok(Some(Cache::DeviceWarm)),
            "DThrash" => Ok(None),
            other => Err(format!("cache state '{other}' is not known")),
        }
    }

    /// Returns the kind of test, and the name and description of the device's engine.
    fn kind(&self) -> Row<(Kind, &'static str, &'static str)> {
        const DMA: (&str, &str) = ("dma", "by its DMA engine");
        const COMMAND: (&str, &str) = ("cmd", "by direct commands of a core");
        let (kind, (engine, words)) = match self.text("Test")? {
            "LAT_DMA_RD" => (Kind::LatRd, DMA),
            "LAT_DMA_WRRD" => (Kind::LatWrrd, DMA),
            "LAT_CMD_RD" => (Kind::LatRd, COMMAND),
            "LAT_CMD_WRRD" => (Kind::LatWrrd, COMMAND),
            "BW_DMA_RD" => (Kind::BwRd, DMA),
            "BW_DMA_WR" => (Kind::BwWr, DMA),
            "BW_DMA_RW" => (Kind::BwRdwr, DMA),
            other => return Err(format!("test '{other}' is not known")),
        };
        Ok((kind, engine, words))
    }

    /// `TAvg` is not imported: it is above the 99.9th percentile, because it is the time of a whole loop and not a
    /// trimmed mean. The trimmed mean and the 99th percentile come from the distribution, if there is one.
    fn latency(&self, cdf: Vec<(f64, f64)>) -> Row<Latency> {
        Ok(Latency {
            average_ns: self.number("Avg(ns)")?,
            trimmed_average_ns: (!cdf.is_empty()).then(|| trimmed_average(&cdf)),
            min_ns: self.number("Min(ns)")?,
            p50_ns: self.number("Med(ns)")?,
            p95_ns: self.number("95%(ns)")?,
            p99_ns: quantile_of_cdf(&cdf, 0.99),
            p999_ns: self.number("99.9%(ns)")?,
            max_ns: self.number("Max(ns)")?,
            timer_cost_ns: 0.0,
            timer_step_ns: TIMER_STEP_NS,
            cdf,
            raw_ns: Vec::new(),
        })
    }

    fn bandwidth(&self) -> Row<Bandwidth> {
        Ok(Bandwidth {
            gbps: self.number("BW (GB/s)")?,
            mtransfers_per_s: self.number("Trans/s")? / 1e6,
            elapsed_ns: self.number("Time")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BANDWIDTHS: &str = "Test,PAT,Cache,HO,DO,WinSZ,SZ,Time(cyc),Time,Bytes,Trans,BW (GB/s),Trans/s\r\n\
        BW_DMA_RD,Rand,HWarm,0,0,8192,64,179895856,149913213.33333334,536870912,8388608,28.649691381440157,\
        55956428.4793753\r\n\
        BW_DMA_RW,Rand,DThrash,0,0,8192,64,1,1,1,1,1,1\r\n\
        BW_DMA_WR,Seq,Cold,1,2,1572864.0,64,212417680,177014733.3,536870912,8388608,24.26333229512722,47389320.8\r\n";
    const LATENCIES: &str = "Test,PAT,Cache,HO,DO,WinSZ,SZ,TAvg,Avg,Med,Min,Max,95%,99.9%,TAvg(ns),Avg(ns),Med(ns),\
        Min(ns),Max(ns),95%(ns),99.9%(ns),#outliers,#samples\n\
        LAT_DMA_RD,Rand,HWarm,0,0,8192,64,949,716.58,720.0,656,11616,736.0,752.0,790.83,597.15,600.0,546.67,9680.0,\
        613.33,626.67,68,16777216\n\
        LAT_CMD_WRRD,Seq,Cold,0,0,4096,8,1,2,3,4,5,6,7,10,20,30,40,50,60,70,0,100\n";
    const CDF: &str = "cycles,ns,cdf\n656,546.67,0\n656,546.67,0.0004\n720,600.0,0.9\n736,613.33,0.995\n\
        11616,9680.0,1\n4,40,0\n4,40,1\n";

    fn import_as(folder: &str, files: &[(&str, &str)]) -> Result<Imported> {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(folder);
        fs::create_dir(&folder).unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
        import(root.path())
    }

    #[test]
    fn bandwidths_are_read_and_rows_of_unknown_cache_states_are_counted() {
        let imported = import_as("hsw-Xeon_x-iommu-nosp", &[("bw.csv", BANDWIDTHS)]).unwrap();
        let [read, write] = &imported.results[..] else { panic!("{imported:?}") };
        assert_eq!((imported.rows_skipped, read.device.as_str()), (1, "published:hsw-dma"));
        let Outcome::Bandwidth(bandwidth) = &read.outcome else { panic!("{read:?}") };
        assert_eq!((bandwidth.gbps, bandwidth.elapsed_ns), (28.649691381440157, 149913213.33333334));
        assert_eq!((read.test.iommu, read.test.numa, read.test.order), (Iommu::Pages4K, Numa::Local, Order::Random));
        let test = &write.test;
        assert_eq!((test.window_bytes, test.host_offset_bytes, test.device_offset_bytes), (1572864, 1, 2));
        assert_eq!((test.test, test.cache, test.order), (Kind::BwWr, Cache::Cold, Order::Sequential));
    }

    #[test]
    fn latencies_are_read_with_their_distributions() {
        let files = [("lat_details.csv", LATENCIES), ("lat_details_cdf.csv", CDF)];
        let imported = import_as("ib-Xeon_dell-s0-s1-s1", &files).unwrap();
        let [first, second] = &imported.results[..] else { panic!("{imported:?}") };
        assert_eq!(
            (first.test.numa, first.device.as_str(), second.device.as_str()),
            (Numa::Remote, "published:ib-dma", "published:ib-cmd")
        );
        let Outcome::Latency(latency) = &first.outcome else { panic!("{first:?}") };
        assert_eq!(
            (latency.p50_ns, latency.p99_ns, latency.max_ns, latency.cdf.len()),
            (600.0, Some(613.33), 9680.0, 4)
        );
        let Outcome::Latency(latency) = &second.outcome else { panic!("{second:?}") };
        assert_eq!((latency.average_ns, &latency.cdf[..]), (20.0, &[(40.0, 1.0)][..]));
    }

    #[test]
    fn a_deviation_from_the_published_form_is_named_with_its_line() {
        let head = BANDWIDTHS.lines().next().unwrap();
        for (text, words) in [
            (String::new(), "1: not a file of pcie-bench"),
            ("a,b,c\n1,2,3\n".to_owned(), "1: not a file of pcie-bench"),
            (CDF.to_owned(), "1: distributions only"),
            (format!("{head}\nBW_DMA_RD,Rand,Lukewarm,0,0,8192,64,1,1,1,1,1,1\n"), "2: cache state 'Lukewarm'"),
            (format!("{head}\nBW_XYZ,Rand,Cold,0,0,8192,64,1,1,1,1,1,1\n"), "2: test 'BW_XYZ'"),
            (format!("{head}\nBW_DMA_RD,Rand,Cold,0,0,8192,abc,1,1,1,1,1,1\n"), "2: SZ is 'abc'"),
            (format!("{head}\nBW_DMA_RD,Rand,Cold,0,0,8192\n"), "2: no column"),
            (format!("{head}\nBW_DMA_RD,Rand,Cold,0,0,1024,2048,1,1,1,1,1,1\n"), "2: a window of 1024"),
        ] {
            let error = import_as("x", &[("a.csv", &text)]).unwrap_err();
            assert!(error.is_wrong_use() && error.to_string().contains(words), "{error}");
        }
        assert!(import_as("empty", &[]).unwrap_err().to_string().contains("no file"));
        assert!(import(Path::new("/nowhere")).unwrap_err().is_wrong_use());
    }

    #[test]
    fn the_link_is_the_one_in_use_not_the_supported_one() {
        let text = "02:00.0 Co-processor: Netronome Systems, Inc. Device 6000\n\
                    \tDevCap: MaxPayload 2048 bytes\n\tDevCtl: x\n\t\tMaxPayload 128 bytes, MaxReadReq 512 bytes\n\
                    \tLnkCap: Port #0, Speed 8GT/s, Width x8\n\tLnkSta: Speed 5GT/s, Width x4, TrErr-\n\n03:00.0 x\n";
        let link = link_of(text).unwrap();
        assert_eq!((link.generation.number(), link.lanes.count(), link.mps_bytes.bytes()), (2, 4, 128));
        assert_eq!(link_of("03:00.0 Ethernet\n"), None);
    }
}
