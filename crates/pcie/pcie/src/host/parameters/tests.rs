use super::*;

#[test]
fn every_built_in_file_is_a_system() {
    for name in names() {
        let parameters = Parameters::named(name).unwrap();
        assert!(!parameters.description.is_empty() && parameters.base.is_none(), "{name}");
    }
    let is_prediction = |name| Parameters::named(name).unwrap().prediction.is_some();
    assert!(is_prediction("bdw") && is_prediction("genoa") && !is_prediction("hsw") && !is_prediction("snb"));
}

#[test]
fn a_file_names_only_what_differs_from_its_base() {
    let hsw = Parameters::named("hsw").unwrap();
    let changed = Parameters::parse("mine.toml", "base = \"hsw\"\n[iommu]\nwalk_ns = 500\n").unwrap();
    assert_eq!(changed.iommu.walk_ns, 500.0);
    assert_eq!((changed.memory, changed.device), (hsw.memory, hsw.device));
}

#[test]
fn an_error_names_file_line_key_and_remedy() {
    for (text, words) in [
        ("[iommu]\nwalk_us = 1", &["mine.toml", "line 3", "iommu.walk_us", "walk_ns", "end in _ns"][..]),
        ("[iommu]\nwalk_ns = \"1 us\"", &["line 3", "iommu.walk_ns", "1 us", "a number of nanoseconds"]),
        ("[cache]\nmib = \"15 MB\"", &["line 3", "cache.mib", "15 MB", "2^20 bytes"]),
        ("[iommu]\nwalk_ns = 1e12", &["line 3", "iommu.walk_ns", "out of range", "0 to 1000000000"]),
        ("[iommu]\nwalk_ns = nan", &["line 3", "iommu.walk_ns", "NaN"]),
        ("[iommu]\nways = 7", &["line 3", "iommu.ways", "7", "iommu.entries"]),
        ("[credits]\nposted_data = 3", &["line 3", "credits.posted_data", "17"]),
        ("[device]\ntags = 0", &["line 3", "device.tags", "1 to 1024"]),
        ("[link]\nmps_bytes = 300", &["line 3", "link.mps_bytes", "300", "power of two"]),
        ("[tails]\nquantiles = [[0.5, 1.0]]", &["line 3", "tails.quantiles", "share 0 to share 1"]),
        ("[prediction]\nrests_on = \"\"", &["line 3", "prediction.rests_on", "one line"]),
        ("[prediction]\nrests_on = \"a\\nb\"", &["line 3", "prediction.rests_on", "one line"]),
        ("[prediction]\nrests_on = \"a\"\nlatency_error_percent = nan", &["line 4", "NaN", "0 to 99"]),
        ("[prediction]\nrests_on = \"a\"\niommu_error_percent = -5", &["line 4", "iommu_error_percent", "-5"]),
        ("[prediction]\nlatency_error_percent = 5", &["rests_on"]),
        ("[nonsense]", &["line 2", "nonsense", "iommu"]),
        ("[iommu", &["line 2"]),
    ] {
        let error = Parameters::parse("mine.toml", &format!("base = \"hsw\"\n{text}\n")).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        for word in words {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
    }
    let error = Parameters::parse("mine.toml", "base = 5").unwrap_err().to_string();
    assert!(error.contains("line 1, base: integer is not a name"), "{error}");
    let error = Parameters::parse("mine.toml", "").unwrap_err().to_string();
    assert_eq!(error, "mine.toml, line 1: missing field 'description'");
    let error = Parameters::parse("mine.toml", "base = \"p4\"").unwrap_err().to_string();
    assert!(error.contains("p4") && error.contains("hsw"), "{error}");
    let error = Parameters::parse("mine.toml", "description = \"bare\"").unwrap_err().to_string();
    assert!(error.contains("missing field 'link'"), "{error}");
    assert!(Parameters::named("nfp-6000").is_err(), "a device alone is not a system");
}
