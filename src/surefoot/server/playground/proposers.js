// Colours of proposers: by their names, in the order in which the server lists them.

export const TARGET = "target";
const COLOURS = 6;
const names = [];

/** The class of a proposer's tokens; a name that was never listed gets the next colour. */
export function classOf(name) {
  if (name === TARGET) return TARGET;
  if (!names.includes(name)) know([name]);
  return `p${names.indexOf(name) % COLOURS}`;
}

export function know(listed) {
  names.push(...listed.filter((name) => !names.includes(name)));
  const items = [TARGET, ...names].map((name) => {
    const item = document.createElement("li");
    const swatch = document.createElement("span");
    swatch.className = `t swatch ${name === TARGET ? TARGET : classOf(name)}`;
    swatch.textContent = name;
    item.append(swatch);
    return item;
  });
  document.getElementById("legend").replaceChildren(...items);
}
