//! Numbers and texts that look random and are the same in every run.

/// A linear congruential generator.
#[derive(Debug, Clone)]
pub(super) struct Seeded(u64);

impl Seeded {
    pub(super) fn new(seed: u64) -> Seeded {
        Seeded(seed)
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end.max(1)
    }

    /// A text of `length` characters of an alphabet of ASCII characters.
    pub(super) fn text(&mut self, alphabet: &str, length: usize) -> String {
        let characters: Vec<char> = alphabet.chars().collect();
        (0..length).map(|_| characters[self.below(characters.len())]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_text_and_all_characters_of_the_alphabet() {
        let text = Seeded::new(1).text("ab", 1_000);
        assert_eq!(text, Seeded::new(1).text("ab", 1_000));
        assert_ne!(text, Seeded::new(2).text("ab", 1_000));
        assert!((400..600).contains(&text.matches('a').count()));
    }
}
