use super::*;
use pcie_bench::testing::{bandwidth, latency};

fn all(results: &[TestResult]) -> Vec<(String, Figure)> {
    plots(&Labelled::unlabelled(results))
}

#[test]
fn a_sweep_is_plotted_over_the_parameter_that_varies_most() {
    let mut results = Vec::new();
    for window_bytes in [4096, 8192, 16384] {
        for size in [128, 64] {
            let mut result = bandwidth("sim:hsw", size, f64::from(size) + window_bytes as f64);
            result.test.window_bytes = window_bytes;
            results.push(result);
        }
    }
    let plots = all(&results);
    let [(name, figure)] = &plots[..] else { panic!("{}", plots.len()) };
    assert_eq!(name, "bw-rd-by-window");
    assert_eq!(figure.title, "Bandwidth of reads\nsim:hsw, host-warm");
    let titles: Vec<_> = figure.series.iter().map(|series| series.title.as_str()).collect();
    assert_eq!(titles, ["128 B", "64 B", "published, hsw"]);
    let published = &figure.series[2].points;
    assert!(published.iter().any(|(window, gbps)| *window == 8192.0 && *gbps > 10.0), "{published:?}");
    assert_eq!(figure.series[1].points, [(4096.0, 4160.0), (8192.0, 8256.0), (16384.0, 16448.0)]);
}

#[test]
fn more_lines_than_a_reader_can_tell_apart_become_several_plots() {
    let windows = [4096, 8192, 16_384, 32_768, 65_536];
    let of = |device: &str, size, iommu| {
        windows.map(|window_bytes| {
            let mut result = bandwidth(device, size, 20.0);
            (result.test.window_bytes, result.test.iommu) = (window_bytes, iommu);
            result
        })
    };
    let mut results = Vec::new();
    for device in ["sim:hsw", "sim:ib"] {
        for size in [64, 128, 256, 512] {
            [Iommu::Off, Iommu::Pages4K].into_iter().for_each(|iommu| results.extend(of(device, size, iommu)));
        }
    }
    let plots = all(&results);
    let names: Vec<&str> = plots.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["64-b", "128-b", "256-b", "512-b"].map(|size| format!("bw-rd-by-window-{size}")));
    let is_line = |series: &&Series| !series.title.starts_with("published");
    assert!(plots.iter().all(|(_, figure)| figure.series.iter().filter(is_line).count() == 4));
    let devices: Vec<_> = (0..9).flat_map(|index| of(&format!("sim:{index}"), 64, Iommu::Off)).collect();
    let lines: Vec<usize> = all(&devices).iter().map(|(_, figure)| figure.series.len()).collect();
    assert_eq!(lines, [8, 1]);
}

#[test]
fn medians_show_the_spread_of_the_samples() {
    let mut results = [64, 128].map(|size| latency("sim:hsw", size, 600.0));
    for result in &mut results {
        let Outcome::Latency(latency) = &mut result.outcome else { panic!("a latency") };
        latency.cdf = vec![(500.0, 0.04), (510.0, 0.05), (600.0, 0.9), (700.0, 0.96), (900.0, 1.0)];
    }
    let figure = &all(&results)[0].1;
    assert_eq!(figure.series[0].spread, [(64.0, 510.0, 700.0), (128.0, 510.0, 700.0)]);
    assert_eq!(figure.notes, ["Bars: 5th to 95th percentile."]);
}

#[test]
fn a_plot_of_predictions_says_what_they_rest_on_and_their_errors() {
    let mut results = vec![bandwidth("sim:hsw", 64, 20.0)];
    for (size, error_percent) in [(64, None), (1024, Some(15.0)), (2048, Some(15.0))] {
        let mut result = bandwidth("sim:milan", size, 20.0);
        result.prediction = Some(PredictionNote { rests_on: "a data sheet".into(), error_percent });
        results.push(result);
    }
    let expected = "Prediction sim:milan, error unknown or +-15%; it rests on a data sheet.";
    assert_eq!(all(&results)[0].1.notes, [expected]);
    let mut latency = latency("sim:milan", 64, 600.0);
    latency.prediction = Some(PredictionNote { rests_on: "a data sheet".into(), error_percent: Some(50.0) });
    let plots = all(&[latency]);
    assert_eq!(plots.len(), 2);
    for (name, figure) in &plots {
        assert_eq!(figure.notes, ["Prediction sim:milan, +-50%; it rests on a data sheet."], "{name}");
    }
}

#[test]
fn latencies_have_distributions_too() {
    let plots = all(&[latency("sim:hsw", 64, 600.0)]);
    let names: Vec<_> = plots.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["lat-rd-cdf", "lat-rd-above"]);
    let below: Vec<_> = plots[0].1.series[0].points.iter().map(|(ns, share)| (*ns, share.round())).collect();
    assert_eq!(below, [(600.0, 0.0), (600.0, 99.0), (1200.0, 99.0), (1200.0, 100.0)]);
    let above = &plots[1].1.series[0].points;
    assert_eq!((above.len(), above[0], above[2].0), (3, (600.0, 1.0), 1200.0));
    assert!((above[1].1 - 0.01).abs() < 1e-9 && above[1] == (600.0, above[2].1), "{above:?}");
}

#[test]
fn model_and_measurement_share_a_colour_and_differ_in_line_style() {
    let results: Vec<_> = ["sim:hsw", "published:hsw"]
        .into_iter()
        .flat_map(|device| [64, 128].map(|size| bandwidth(device, size, 20.0)))
        .collect();
    let plots = all(&results);
    let series = &plots[0].1.series;
    assert_eq!((series.len(), series[2].title.as_str()), (3, "upper bound (protocol)"));
    assert_eq!(series[2].points.len(), 17, "every double word from 64 to 128");
    assert_eq!([series[0].title.as_str(), series[1].title.as_str()], ["sim:hsw", "published:hsw"]);
    assert_eq!(series[0].style.color, series[1].style.color);
    assert_eq!((series[0].style.line, series[1].style.line), (Line::Solid, Line::None));
}

#[test]
fn two_models_and_one_measurement_have_distinct_colours() {
    let results: Vec<_> = ["published:hsw", "sim:hsw", "sim:ib"]
        .into_iter()
        .flat_map(|device| [64, 128].map(|size| bandwidth(device, size, 20.0)))
        .collect();
    let plots = all(&results);
    let colors: Vec<Color> = plots[0].1.series.iter().map(|series| series.style.color).collect();
    assert!(colors[0] == colors[1] && colors[1] != colors[2], "{colors:?}");
}

#[test]
fn every_figure_is_a_sweep_of_valid_tests() {
    let common = Grid {
        devices: vec!["sim:hsw".into()],
        tests: Vec::new(),
        numas: Vec::new(),
        iommus: Vec::new(),
        caches: Vec::new(),
        orders: Vec::new(),
        sizes_bytes: Vec::new(),
        windows_bytes: Vec::new(),
        host_offsets_bytes: Vec::new(),
        device_offsets_bytes: Vec::new(),
        latency_samples: 10,
        bandwidth_samples: 10,
        seed: 1,
    };
    for figure in PaperFigure::value_variants() {
        let jobs = figure.grid(common.clone()).jobs().unwrap();
        assert!(!jobs.is_empty(), "{figure:?}");
        jobs.iter().for_each(|job| job.test.check().unwrap());
    }
}
