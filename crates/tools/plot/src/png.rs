//! Rendering of an SVG to PNG.

use std::sync::Arc;

use anyhow::{Context, Result};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree, fontdb};

/// Image pixels per pixel of the drawing: fine enough for print.
const SCALE: f32 = 2.5;

/// Renders an SVG with the built-in font only, so that every machine produces the same image.
pub(crate) fn render(svg: &str) -> Result<Vec<u8>> {
    let mut fonts = fontdb::Database::new();
    fonts.load_font_data(dejavu::sans::regular().to_vec());
    fonts.set_sans_serif_family("DejaVu Sans");
    let options = Options { fontdb: Arc::new(fonts), ..Options::default() };
    let tree = Tree::from_str(svg, &options).context("reading the SVG")?;
    let size = tree.size();
    let (width, height) = ((size.width() * SCALE).ceil() as u32, (size.height() * SCALE).ceil() as u32);
    let mut image = Pixmap::new(width, height).with_context(|| format!("an image of {width} x {height} pixels"))?;
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut image.as_mut());
    image.encode_png().context("compressing the PNG")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dark_pixels(text: &str) -> usize {
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"200\" height=\"40\">\
             <rect width=\"200\" height=\"40\" fill=\"white\"/>\
             <text x=\"5\" y=\"25\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"20\">{text}</text></svg>"
        );
        let image = Pixmap::decode_png(&render(&svg).unwrap()).unwrap();
        assert_eq!((image.width(), image.height()), (500, 100));
        image.pixels().iter().filter(|pixel| pixel.red() < 100).count()
    }

    #[test]
    fn text_is_rendered_without_fonts_of_the_machine() {
        assert_eq!(dark_pixels(""), 0);
        assert!(dark_pixels("transfer") > 500);
        assert!(dark_pixels("µ⁻⁶") > 50);
    }
}
