//! Distributions of flow sizes.

use std::path::Path;

use config::ConfigError;
use serde::Deserialize;

const BUILT_IN: [(&str, &str); 5] = [
    ("cache-follower", include_str!("../../distributions/cache-follower.toml")),
    ("web-search", include_str!("../../distributions/web-search.toml")),
    ("hadoop", include_str!("../../distributions/hadoop.toml")),
    ("storage-2019", include_str!("../../distributions/storage-2019.toml")),
    ("storage-2022", include_str!("../../distributions/storage-2022.toml")),
];

/// Accepted difference of a distribution's last share from 1.
const TOLERANCE: f64 = 1e-9;

/// A distribution of flow sizes: points of the cumulative distribution, interpolated linearly.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizeDistribution {
    /// The distribution's name.
    pub name: String,
    /// The publication that its points come from.
    pub source: String,
    /// Sizes in bytes with the share of flows that are not larger.
    points: Points,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Vec<(f64, f64)>")]
struct Points(Vec<(f64, f64)>);

impl TryFrom<Vec<(f64, f64)>> for Points {
    type Error = String;

    fn try_from(points: Vec<(f64, f64)>) -> Result<Self, String> {
        let (Some(first), Some(last), true) = (points.first(), points.last(), points.len() > 1) else {
            return Err("too few points; give at least two of [bytes, share of flows that are not larger]".to_owned());
        };
        if first.1 != 0.0 {
            return Err(format!("the share of the first point is {}; it must be 0", first.1));
        }
        if (last.1 - 1.0).abs() > TOLERANCE {
            let share = last.1;
            return Err(format!("the share of the last point is {share}; it must be 1"));
        }
        let is_possible =
            |(bytes, share): &(f64, f64)| bytes.is_finite() && *bytes >= 0.0 && (0.0..=1.0).contains(share);
        if let Some((bytes, share)) = points.iter().find(|point| !is_possible(point)) {
            return Err(format!("[{bytes}, {share}] is not a point; give bytes from 0 and a share from 0 to 1"));
        }
        if let Some(pair) = points.windows(2).find(|pair| pair[1].0 <= pair[0].0 || pair[1].1 < pair[0].1) {
            let [(bytes, share), (next_bytes, next_share)] = [pair[0], pair[1]];
            return Err(format!(
                "[{next_bytes}, {next_share}] cannot follow [{bytes}, {share}]; sizes must rise, shares must not fall"
            ));
        }
        Ok(Self(points))
    }
}

impl SizeDistribution {
    /// Returns a built-in distribution by its name, or reads the file with that path.
    ///
    /// # Errors
    /// When `name` is neither, or the file is invalid.
    pub fn find(name: &str) -> Result<Self, ConfigError> {
        if let Some((name, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
            return config::parse(name, text);
        }
        if !name.contains(['/', '.']) {
            let names = BUILT_IN.map(|(name, _)| name).join(", ");
            let reason = format!("there is no such distribution; name one of {names}, or give a path");
            return Err(ConfigError::Unreadable { file: name.to_owned(), reason });
        }
        config::read(Path::new(name))
    }

    /// Returns the names of the built-in distributions.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.into_iter().map(|(name, _)| name)
    }

    /// Returns the mean size of a flow.
    pub fn mean_bytes(&self) -> f64 {
        let part = |pair: &[(f64, f64)]| (pair[1].1 - pair[0].1) * (pair[0].0 + pair[1].0) / 2.0;
        self.points.0.windows(2).map(part).sum()
    }

    /// Returns the size that the share `share` of flows does not exceed, at least 1 byte. A uniform random share from 0
    /// to 1 gives a random size of this distribution.
    pub fn size_at(&self, share: f64) -> u64 {
        let points = &self.points.0;
        let above = points.partition_point(|(_, at)| *at <= share).clamp(1, points.len() - 1);
        let ((bytes, low), (next_bytes, high)) = (points[above - 1], points[above]);
        let part = if high > low { ((share - low) / (high - low)).clamp(0.0, 1.0) } else { 1.0 };
        ((bytes + part * (next_bytes - bytes)).round() as u64).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sim::Random;

    #[test]
    fn samples_of_built_in_distributions_have_their_mean() {
        for name in SizeDistribution::names() {
            let sizes = SizeDistribution::find(name).unwrap();
            assert_eq!((sizes.name.as_str(), sizes.source.is_empty()), (name, false));
            let (mut random, draws) = (Random::new(1, "sizes"), 200_000);
            let sum: u64 = (0..draws).map(|_| sizes.size_at(random.unit())).sum();
            let mean = sum as f64 / f64::from(draws);
            assert!((mean / sizes.mean_bytes() - 1.0).abs() < 0.03, "{name}: {mean}, not {}", sizes.mean_bytes());
        }
    }

    #[test]
    fn sizes_are_interpolated_between_points() {
        let sizes = SizeDistribution::find("cache-follower").unwrap();
        assert_eq!([0.0, 0.01, 0.5, 0.9, 1.0].map(|share| sizes.size_at(share)), [1, 70, 30_000, 2_400_000, 3_000_000]);
        assert_eq!(sizes.size_at(0.95), 2_700_000);
    }

    #[test]
    fn an_invalid_point_is_named_with_its_line() {
        for (points, expected) in [
            ("[[0, 0], [9, 0.9]]", "the share of the last point is 0.9; it must be 1"),
            ("[[0, 0.1], [9, 1]]", "the share of the first point is 0.1; it must be 0"),
            ("[[0, 0], [9, 0.5], [9, 1]]", "[9, 1] cannot follow [9, 0.5]; sizes must rise, shares must not fall"),
            ("[[0, 0], [-9, 0.5], [9, 1]]", "[-9, 0.5] is not a point; give bytes from 0 and a share from 0 to 1"),
            ("[]", "too few points; give at least two of [bytes, share of flows that are not larger]"),
        ] {
            let text = format!("name = \"a\"\nsource = \"b\"\npoints = {points}\n");
            let error = config::parse::<SizeDistribution>("sizes.toml", &text).unwrap_err().to_string();
            assert_eq!(error, format!("sizes.toml, line 3, points: {expected}"));
        }
        let error = SizeDistribution::find("cache").unwrap_err().to_string();
        assert!(
            error.starts_with("cache: there is no such distribution") && error.contains("cache-follower"),
            "{error}"
        );
    }
}
