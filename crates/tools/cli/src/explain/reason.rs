//! Why a socket has no lane: the reasons that the library records, and those that only an observer can see.

use stats_page::FallbackReason;

use crate::processes::Obstacle;

/// The reason if two programs meet in a shared rack, and its rules do not allow that.
pub const DENIED_BY_RULES: FallbackReason = FallbackReason::NoRule;

/// A reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The library of the program has recorded it.
    Recorded(FallbackReason),
    /// The program itself has no lanes.
    Program(Obstacle),
    /// The program at the other side has none.
    Peer(Obstacle),
    /// Both programs have lanes, in different rack directories.
    OtherRack,
    /// The socket is neither connected nor listening.
    NotConnected,
    /// The statistics page of the program is of another release.
    OtherRelease,
    /// The library of the program could not create its statistics page.
    Unpublished,
    /// The connection has not proved busy, as far as is known.
    NotBusy,
}

/// In the order of their numbers.
const OBSTACLES: [Obstacle; 8] = [
    Obstacle::Static,
    Obstacle::Go,
    Obstacle::OtherCLibrary,
    Obstacle::OtherArchitecture,
    Obstacle::Privileged,
    Obstacle::LibraryMissing,
    Obstacle::NotLoaded,
    Obstacle::OffByVariable,
];

impl Reason {
    /// Returns all reasons.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        let recorded = FallbackReason::ALL.iter().copied().map(Self::Recorded);
        let others = [Self::OtherRack, Self::NotConnected, Self::OtherRelease, Self::Unpublished, Self::NotBusy];
        recorded.chain(OBSTACLES.map(Self::Program)).chain(OBSTACLES.map(Self::Peer)).chain(others)
    }

    /// Returns the word used in JSON and in docs/troubleshooting.md.
    pub fn name(self) -> String {
        match self {
            Self::Recorded(reason) => reason.name().to_owned(),
            Self::Program(obstacle) => obstacle_name(obstacle).to_owned(),
            Self::Peer(obstacle) => format!("peer_{}", obstacle_name(obstacle)),
            Self::OtherRack => "other_rack".to_owned(),
            Self::NotConnected => "not_connected".to_owned(),
            Self::OtherRelease => "other_release".to_owned(),
            Self::Unpublished => "unpublished".to_owned(),
            Self::NotBusy => "not_busy".to_owned(),
        }
    }

    /// Returns the number of the reason, which keeps its meaning.
    pub fn number(self) -> u16 {
        let position = |obstacle| OBSTACLES.iter().position(|it| *it == obstacle).unwrap_or(OBSTACLES.len()) as u16;
        match self {
            Self::Recorded(reason) => reason as u16 + 1,
            Self::Program(obstacle) => 101 + position(obstacle),
            Self::Peer(obstacle) => 121 + position(obstacle),
            Self::OtherRack => 141,
            Self::NotConnected => 142,
            Self::OtherRelease => 143,
            Self::Unpublished => 144,
            Self::NotBusy => 145,
        }
    }

    /// Returns the reason in a few words.
    pub fn explanation(self) -> String {
        match self {
            Self::Recorded(reason) => reason.explanation().to_owned(),
            Self::Program(obstacle) => format!("the program {}", obstacle_explanation(obstacle)),
            Self::Peer(obstacle) => format!("the program at the other side {}", obstacle_explanation(obstacle)),
            Self::OtherRack => "the two programs meet in different rack directories".to_owned(),
            Self::NotConnected => "the socket is neither connected nor listening yet".to_owned(),
            Self::OtherRelease => {
                "the program runs a library of another release, whose state cannot be read".to_owned()
            }
            Self::Unpublished => {
                "the library could not create its page in the rack directory, whose file system is full or an overlay, \
                 or where a limit forbids it: its lanes are not shown"
                    .to_owned()
            }
            Self::NotBusy => "it has carried only a few requests since this program opened it, another program has \
                              passed it on, or a socket option keeps it there"
                .to_owned(),
        }
    }

    /// Returns what to do about it.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Recorded(reason) => reason.remedy(),
            Self::Program(obstacle) | Self::Peer(obstacle) => obstacle_remedy(obstacle),
            Self::OtherRack => "give both the same --rack or CROSSLANE_RACK",
            Self::NotConnected => "nothing: it is not used yet",
            Self::OtherRelease => "restart the program with the library of this release, or use that release's command",
            Self::Unpublished => {
                "free space in the rack directory's file system, or give a directory on another one, and restart the \
                 program"
            }
            Self::NotBusy => "nothing: a connection moves to a lane with its fourth request or later",
        }
    }
}

fn obstacle_name(obstacle: Obstacle) -> &'static str {
    match obstacle {
        Obstacle::Static => "static_program",
        Obstacle::Go => "go_program",
        Obstacle::OtherCLibrary => "other_c_library",
        Obstacle::OtherArchitecture => "other_architecture",
        Obstacle::Privileged => "privileged_program",
        Obstacle::LibraryMissing => "library_missing",
        Obstacle::NotLoaded => "not_loaded",
        Obstacle::OffByVariable => "off_by_variable",
    }
}

fn obstacle_explanation(obstacle: Obstacle) -> &'static str {
    match obstacle {
        Obstacle::Static => "is statically linked and loads no library",
        Obstacle::Go => "is a Go program, which makes system calls without the C library",
        Obstacle::OtherCLibrary => "is linked against another C library than glibc",
        Obstacle::OtherArchitecture => "is built for another processor or word size",
        Obstacle::Privileged => "is setuid, setgid or has file capabilities, so the loader ignores LD_PRELOAD",
        Obstacle::LibraryMissing => "has LD_PRELOAD set, but the loader did not find or load the library",
        Obstacle::NotLoaded => "runs without crosslane",
        Obstacle::OffByVariable => "runs with CROSSLANE_OFF",
    }
}

fn obstacle_remedy(obstacle: Obstacle) -> &'static str {
    match obstacle {
        Obstacle::Static => "use a dynamically linked build of it",
        Obstacle::Go => "nothing: a Go program can use only kernel TCP",
        Obstacle::OtherCLibrary => "use a glibc build of it",
        Obstacle::OtherArchitecture => "use a 64-bit build of it for this machine",
        Obstacle::Privileged => "run a copy without these privileges, or run it as its owner",
        Obstacle::LibraryMissing => {
            "make the library readable at the path in LD_PRELOAD, as the program sees the file system"
        }
        Obstacle::NotLoaded => "start it with crosslane run, or set LD_PRELOAD for it",
        Obstacle::OffByVariable => "unset CROSSLANE_OFF and restart it",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns the third-level headings of a document.
    fn headings(text: &str) -> BTreeSet<String> {
        let headings = text.lines().filter_map(|line| line.strip_prefix("### "));
        headings.flat_map(|heading| heading.split(", ")).map(|name| name.trim_matches('`').to_owned()).collect()
    }

    #[test]
    fn each_reason_has_a_paragraph_in_the_troubleshooting_page() {
        let documented = headings(include_str!("../../../../../docs/troubleshooting.md"));
        let names: BTreeSet<String> = Reason::all().map(Reason::name).collect();
        assert_eq!(names.len(), Reason::all().count(), "names are unique");
        assert_eq!(documented, names);
    }

    #[test]
    fn each_reason_is_explained_in_one_line() {
        for reason in Reason::all() {
            let (explanation, remedy) = (reason.explanation(), reason.remedy());
            assert!(!explanation.is_empty() && !remedy.is_empty(), "{reason:?}");
            assert!(!explanation.ends_with('.') && !remedy.ends_with('.'), "{reason:?}");
        }
    }
}
