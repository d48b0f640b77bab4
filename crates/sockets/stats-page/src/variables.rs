//! The environment variables of the library. The command documents them: `crosslane run --help` and the manual.

/// A variable that the library reads when it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What it is set to, as in a synopsis.
    pub value: &'static str,
    /// What it means, and what applies without it; sentences.
    pub meaning: &'static str,
}

/// All variables, sorted by name.
pub const VARIABLES: [Variable; 8] = [
    Variable {
        name: "CROSSLANE_EXCEPT",
        value: "PORTS",
        meaning: "Server ports whose connections stay on kernel TCP, as in 22,443,6000-6100. Not together with \
                  CROSSLANE_ONLY.",
    },
    Variable {
        name: "CROSSLANE_FILTERS",
        value: "ignore|honour",
        meaning: "Whether packet filters of the loopback interface apply to connections between programs of one \
                  machine: 'honour' leaves such connections to kernel TCP. Default: ignore.",
    },
    Variable {
        name: "CROSSLANE_NODE",
        value: "NODE",
        meaning: "The node of the program: a letter a to z, for 127.77.0.1 to 127.77.0.26, or an IP address. It is the \
                  source address of connections to other nodes. Default: none.",
    },
    Variable {
        name: "CROSSLANE_OFF",
        value: "SWITCH",
        meaning: "On: the library passes all calls to the kernel, whatever the other variables say. Default: off.",
    },
    Variable {
        name: "CROSSLANE_ONLY",
        value: "PORTS",
        meaning: "The only server ports whose connections use lanes, as in 80,443,6000-6100. Default: all ports.",
    },
    Variable {
        name: "CROSSLANE_RACK",
        value: "DIRECTORY",
        meaning: "The directory in which programs meet. It must exist, belong to the user and have mode 0700, or be a \
                  shared rack of root's ('crosslane rack-dir'). Default: $XDG_RUNTIME_DIR/crosslane, else \
                  /dev/shm/crosslane-UID, created on demand.",
    },
    Variable {
        name: "CROSSLANE_REQUIRE_LANE",
        value: "SWITCH",
        meaning: "On: a connection that has not got a lane within a second of its first transfer is reset by its next \
                  one, with a line that gives the reason; one that ends within a second is not. Default: off.",
    },
    Variable {
        name: "CROSSLANE_STATS",
        value: "DIRECTORY",
        meaning: "The directory in which the program's counters are; 'crosslane compare' sets it. It must exist and \
                  belong to the user. Default: the directory in which programs meet.",
    },
];

/// What holds for all variables; sentences.
pub const RULES: &str = "A switch is on with 1, true, yes or on, and off with 0, false, no or off. An empty variable \
                         counts as unset. A program whose variables have an invalid value ends with exit code 2 and a \
                         line that names the variable. A warning names CROSSLANE_ variables that do not exist.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_sorted_and_described_in_sentences() {
        assert!(VARIABLES.is_sorted_by_key(|variable| variable.name));
        assert!(VARIABLES.iter().all(|variable| variable.meaning.ends_with('.')));
    }
}
