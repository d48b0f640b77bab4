//! Series that lie on one another: the upper one would hide the lower one.

/// Largest distance of two points that look like one, as a share of the axis.
const ALIKE: f64 = 0.004;
/// Number of consecutive common points from which a reader takes two series for one.
const HIDDEN_MIN: usize = 2;

/// How a series lies on an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overlap {
    /// Nowhere, or at single points.
    None,
    /// In a part.
    Partly,
    /// At every point, on the series with this index.
    Everywhere(usize),
}

/// Returns how each series lies on the earlier ones. Positions are those on the axes; `height` is the length of the
/// vertical one.
pub(crate) fn overlaps(series: &[Vec<(f64, f64)>], height: f64) -> Vec<Overlap> {
    (0..series.len()).map(|index| overlap(&series[..index], &series[index], height)).collect()
}

fn overlap(earlier: &[Vec<(f64, f64)>], points: &[(f64, f64)], height: f64) -> Overlap {
    let is_alike = |a: &(f64, f64), b: &(f64, f64)| a.0 == b.0 && (a.1 - b.1).abs() <= ALIKE * height;
    let mut found = Overlap::None;
    for (index, other) in earlier.iter().enumerate() {
        let common = points.iter().map(|point| other.iter().any(|their| is_alike(point, their)));
        let runs = common.collect::<Vec<_>>();
        if points.len() >= HIDDEN_MIN && points.len() == other.len() && runs.iter().all(|is_common| *is_common) {
            return Overlap::Everywhere(index);
        }
        if runs.windows(HIDDEN_MIN).any(|run| run.iter().all(|is_common| *is_common)) {
            found = Overlap::Partly;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_that_lie_on_an_earlier_one_are_found() {
        let line = |ys: &[f64]| ys.iter().enumerate().map(|(x, y)| (x as f64, *y)).collect::<Vec<_>>();
        let all = [
            line(&[10.0, 20.0, 30.0]),
            line(&[50.0, 20.0, 60.0]),
            line(&[10.1, 20.1, 29.9]),
            line(&[10.0, 20.0, 80.0]),
            vec![],
        ];
        let expected = [Overlap::None, Overlap::None, Overlap::Everywhere(0), Overlap::Partly, Overlap::None];
        assert_eq!(overlaps(&all, 100.0), expected);
        assert_eq!(overlaps(&all, 10.0)[2], Overlap::None, "0.1 is visible at this height");
    }
}
