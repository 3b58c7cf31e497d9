/* What is wrong on a page for those who use keys, a screen reader, or weak eyes: the body of a function, which returns it
   in words. It knows the commonest of the rules of WCAG 2.2, level AA. */

const name = (element) => [
  ...(element.getAttribute("aria-labelledby") || "").split(" ").map((id) => document.getElementById(id)?.textContent),
  element.getAttribute("aria-label"), element.textContent, element.title, element.alt,
  element.querySelector("img")?.alt,
].some((text) => text?.trim());
const labelled = (element) => [...(element.labels || [])].map((label) => label.textContent).join("").trim();
const shown = [...document.body.querySelectorAll("*")].filter((element) => element.checkVisibility());
const faults = [];
const seen = {};
for (const element of shown) {
  const is = (selector) => element.matches(selector);
  const say = (what) => faults.push(`${what}: ${element.outerHTML.slice(0, 120)}`);
  if (is("button, a[href], summary, [role=button], svg[role=img], canvas[role=img], img") && !name(element)) say("no name");
  if (is("input:not([type=hidden]), select, textarea") && !name(element) && !labelled(element)) say("no name");
  if (is("th") && !element.textContent.trim()) say("an empty header");
  if (is("dl:not([role]) > dd:first-child") || is(":not(dl, div) > :is(dd, dt)")) say("no list of definitions");
  if (is("ul > :not(li, script), ol > :not(li, script)")) say("no item of a list");
  if (is("nav, aside, main, header, footer") && !element.closest("article")) {
    const mark = `${element.localName} ${element.getAttribute("aria-label") || ""}`;
    if (seen[mark]) say("two landmarks of one name");
    seen[mark] = true;
  }
  const scrolls = /auto|scroll/.test(getComputedStyle(element).overflowX) && element.scrollWidth > element.clientWidth + 1;
  const inside = () => element.querySelector("a[href], button, input, select, textarea, summary, [tabindex]");
  if (scrolls && !is("textarea, input, select, body, html") && element.tabIndex < 0 && !inside()) say("no key scrolls it");
  if (is("[tabindex]") && element.tabIndex > 0) say("it is out of order for the Tab key");
}
const ids = [...document.querySelectorAll("[id]")].map(({ id }) => id);
faults.push(...new Set(ids.filter((id, i) => ids.indexOf(id) < i).map((id) => `an id twice: ${id}`)));
if (!document.documentElement.lang || !document.title || !document.querySelector("h1")) faults.push("no language, title or heading");

// The contrast of each text with what is behind it; 3 is enough for large letters.
const numbers = (colour) => {
  const c = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  c.fillStyle = colour;
  c.fillRect(0, 0, 1, 1);
  return [...c.getImageData(0, 0, 1, 1).data];
};
const known = {};
const read = (colour) => (known[colour] ??= numbers(colour));
const light = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
  const x = rgb[i] / 255;
  return sum + weight * (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
}, 0);
const over = (top, below) => [0, 1, 2].map((i) => (top[i] * top[3] + below[i] * (255 - top[3])) / 255);
const behind = (element) => {
  const colour = element ? read(getComputedStyle(element).backgroundColor) : [255, 255, 255, 255];
  return colour[3] === 255 ? colour : over(colour, behind(element.parentElement));
};
const faint = {};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
  if (element.closest("script, style, noscript, svg, :disabled, [inert], [aria-hidden=true], .visually-hidden")) continue;
  const { color, fontSize, fontWeight } = getComputedStyle(element);
  const below = behind(element);
  const [a, b] = [light(over(read(color), below)), light(below)].sort((x, y) => y - x);
  const size = parseFloat(fontSize);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < (size >= 24 || (size >= 18.66 && fontWeight >= 700) ? 3 : 4.5) - 0.005) {
    faint[`${element.localName}.${element.className}`] = `${ratio.toFixed(2)} ${texts.currentNode.data.trim().slice(0, 30)}`;
  }
}
return [...faults, ...Object.entries(faint).map(([where, what]) => `contrast: ${what} in ${where}`)];
