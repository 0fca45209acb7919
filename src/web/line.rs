//! Small lines: a figure over time without axes, as the path of an SVG.

use std::fmt::Write as _;

/// A path through the points, evenly spread over the width; `max` is the upper edge. Where a point is
/// missing the line is broken.
pub(super) fn path(points: &[Option<f64>], max: f64, width: f64, height: f64) -> String {
    let mut path = String::new();
    let mut is_down = false;
    for (place, point) in points.iter().enumerate() {
        let Some(value) = point.filter(|value| value.is_finite()) else {
            is_down = false;
            continue;
        };
        let x = x_of(place, points.len(), width);
        let y = height - height * (value / max.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        // A point alone is a line of no length, which round ends make a dot.
        let _ = if is_down {
            write!(path, "L{x:.1} {y:.1}")
        } else {
            write!(path, "M{x:.1} {y:.1}h0")
        };
        is_down = true;
    }
    path
}

/// Where a point of so many stands.
pub(super) fn x_of(place: usize, points: usize, width: f64) -> f64 {
    let last = points.saturating_sub(1).max(1);
    width * float(place) / float(last)
}

/// The greatest of the points; 0 without any.
pub(super) fn greatest(points: &[Option<f64>]) -> f64 {
    points.iter().flatten().copied().fold(0.0, f64::max)
}

fn float(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_broken_where_points_are_missing() {
        let points = [Some(0.0), Some(5.0), None, Some(20.0), Some(f64::NAN)];
        assert_eq!(
            path(&points, 10.0, 40.0, 20.0),
            "M0.0 20.0h0L10.0 10.0M30.0 0.0h0"
        );
        assert_eq!(path(&[Some(1.0)], 0.0, 40.0, 20.0), "M0.0 0.0h0");
        assert_eq!(greatest(&points[..3]), 5.0);
        assert_eq!(greatest(&[]), 0.0);
    }
}
